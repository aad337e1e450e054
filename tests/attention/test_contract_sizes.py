"""Every mechanism at all lengths, widths, groups and dtypes: as accurate as its plain formula, forward and decoding."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attention.cases import COMPLETE_CASES, Case
from attention.covering import Row, full_product, pairwise_covering
from attention.plain import plain_output
from polysketch import attention
from polysketch.attention.linearized import LinearizedAttention
from polysketch.ops.linear.backends import BACKENDS

KV_HEADS = 2
FACTORS = {
    "length": (600, 65, 63, 2, 1),
    "head_dim": (16, 32, 64, 80, 128),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "heads": (2, 4),
    "value_dim": (24, None),
}


# Of the largest unit in the last place, what an output may be off where the plain formula happens to be exact: of short
# sequences the same products are summed in another order, or their quotient is rounded once more.
ROUNDING = {
    torch.float32: 4 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 4,
    torch.float16: torch.finfo(torch.float16).eps / 4,
}


def named(rows: list[Row], name: str) -> list:
    """A run for every row, with the name's cases in turn; those for narrow heads alone where heads are narrow."""
    cases, runs = [case for case in COMPLETE_CASES if case.name == name], []
    for index, row in enumerate(rows):
        fitting = [case for case in cases if case.widest_head is None or row["head_dim"] <= case.widest_head]
        if not fitting:
            continue
        case, values = fitting[index % len(fitting)], "-".join(str(value) for value in row.values())
        runs.append(pytest.param(case, row, id=f"{case}-{values}".replace("torch.", "")))
    return runs


def runs_of(rows: list[Row]) -> list:
    return [run for name in attention.MECHANISMS for run in named(rows, name)]


def every_value(first: int, count: int) -> list[Row]:
    """Rows in which every value of every factor occurs: each factor goes round its values, from another `first` on."""
    return [
        {name: values[(row + first * place) % len(values)] for place, (name, values) in enumerate(FACTORS.items())}
        for row in range(count)
    ]


def few_runs() -> list:
    """For every mechanism every value and every case; which values meet depends on its place in the table."""
    cases = {name: sum(case.name == name for case in COMPLETE_CASES) for name in attention.MECHANISMS}
    return [run for place, name in enumerate(cases) for run in named(every_value(place, max(5, cases[name])), name)]


def relative_error(output: Tensor, exact: Tensor) -> float:
    return float((output.double() - exact).norm() / exact.norm())


def decoded(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...]) -> Tensor:
    """The output of `extend`: the first token, two halves of what is between, the last token."""
    length, outputs = inputs[0].shape[2], []
    dtype = torch.float64 if inputs[0].dtype == torch.float64 else None
    state = mechanism.init_state(1, dtype=dtype, value_dim=inputs[2].shape[3])
    edges = sorted({0, 1, length // 2, length - 1, length})
    for start, end in pairwise(edges):
        query, key, value, hidden = (x.narrow(-2, start, end - start) for x in inputs)
        output, state = mechanism.extend(query, key, value, state, hidden=hidden)
        outputs.append(output)
    return torch.cat(outputs, 2)


@torch.no_grad()
def cancellation(mechanism: LinearizedAttention, inputs: tuple[Tensor, ...], exact: Tensor) -> float:
    """How much larger than the output the terms are that a state of sums adds up, in the same norm.

    (q . k)^2 may be small where |q|^2 |k|^2 is large: the plain formula then has a small number, sums have large ones
    of both signs.
    """
    query, key, value, hidden = inputs
    (query_features, key_features), options = mechanism.operands(query, key, value.dtype, hidden)
    key_features, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key_features, value))
    terms, weights = (
        (x @ y.mT).pow(options["power"]).tril()
        for x, y in ((query_features.abs(), key_features.abs()), (query_features, key_features))
    )
    mass = options["offset"] + weights.sum(-1, keepdim=True) if options.get("normalize", True) else 1.0
    return float((terms @ value.abs() / mass).norm() / exact.norm())


def assert_accurate(case: Case, row: Row) -> None:
    """Forward and decoding within twice the plain formula's error."""
    sizes = {"head_dim": row["head_dim"], "heads": row["heads"], "kv_heads": KV_HEADS}
    mechanism = case.build(
        dtype=torch.float32, head_dim=row["head_dim"], num_heads=row["heads"], num_kv_heads=KV_HEADS
    ).to(row["dtype"])
    inputs = case.inputs(dtype=row["dtype"], batch=1, length=row["length"], value_dim=row["value_dim"], **sizes)
    wide_mechanism, wide_inputs = deepcopy(mechanism).double(), tuple(x.double() for x in inputs)
    options = {"causal": mechanism.is_causal}
    with torch.no_grad():
        exact = wide_mechanism(*wide_inputs[:3], hidden=wide_inputs[3], **options)
        outputs = {"forward": mechanism(*inputs[:3], hidden=inputs[3], **options)}
        plain = plain_output(mechanism, case.name, inputs)
        if mechanism.is_causal:
            outputs["decoding"] = decoded(mechanism, inputs)
            torch.testing.assert_close(decoded(wide_mechanism, wide_inputs), exact, rtol=1e-8, atol=1e-9)
    # A score off by one rounding moves its power by as many as the degree; the plain formula is one draw of that.
    rounding = ROUNDING[row["dtype"]] + getattr(mechanism, "degree", 0) * torch.finfo(torch.float32).eps
    allowed = dict.fromkeys(outputs, 2 * relative_error(plain, exact) + rounding)
    sums_alone = isinstance(mechanism, LinearizedAttention) and mechanism.local_chunk is None
    by_features = sums_alone and getattr(mechanism, "feature_map", None) is not None
    from_sums = {"decoding"} if row["length"] <= BACKENDS["native"].compute_chunk.single else {"decoding", "forward"}
    for kind in allowed.keys() & from_sums if by_features else ():
        allowed[kind] += ROUNDING[torch.float32] * cancellation(wide_mechanism, wide_inputs, exact)
    errors = {kind: relative_error(output, exact) for kind, output in outputs.items()}
    assert all(output.isfinite().all() for output in outputs.values())
    assert {kind: error for kind, error in errors.items() if not error <= allowed[kind]} == {}, f"allowed {allowed}"


def test_every_pair_of_values_is_covered():
    rows, pairs = pairwise_covering(FACTORS), 0
    for index, (one, ones) in enumerate(FACTORS.items()):
        for other, others in list(FACTORS.items())[index + 1 :]:
            assert {(row[one], row[other]) for row in rows} == {(x, y) for x in ones for y in others}
            pairs += 1
    assert pairs == 10
    assert len(rows) <= 30


@pytest.mark.parametrize("place", range(len(attention.MECHANISMS)))
def test_every_value_is_in_the_few_rows_of_a_mechanism(place: int):
    rows = every_value(place, 5)
    assert {name: {row[name] for row in rows} for name in FACTORS} == {name: set(x) for name, x in FACTORS.items()}


@pytest.mark.parametrize(("case", "row"), few_runs())
def test_forward_and_decoding_are_as_accurate_as_the_plain_formula(case: Case, row: Row):
    assert_accurate(case, row)


@pytest.mark.full
@pytest.mark.parametrize(("case", "row"), runs_of(pairwise_covering(FACTORS)))
def test_forward_and_decoding_are_as_accurate_as_the_plain_formula_at_every_pair_of_values(case: Case, row: Row):
    assert_accurate(case, row)


@pytest.mark.full
@pytest.mark.parametrize(("case", "row"), runs_of(full_product(FACTORS)))
def test_forward_and_decoding_are_as_accurate_as_the_plain_formula_at_every_combination(case: Case, row: Row):
    assert_accurate(case, row)
