"""The Triton programs of linear attention compute what the reference defines: output, every gradient, states."""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from attention.covering import first_always
from ops.linear_cases import Case, assert_precision_agrees, assert_same, gradients, make, run
from polysketch import ops
from polysketch.ops.linear.triton import launcher, launches
from polysketch.ops.triton import forced

CASES = [
    Case(length=33, batch=1, heads=2),
    Case(length=37, decays=True, padded=True, batch=1, heads=2, key_heads=1),
    Case(local_chunk=0, decays=True, length=37, batch=1, heads=2, key_heads=1, compute_chunk=16),
    Case(local_chunk=0, padded=True, length=33, heads=2, key_heads=1, compute_chunk=16, features=16),
    Case(power=1, local_chunk=16, decays=True, length=33, batch=1, heads=2, key_heads=1),
    Case(power=1, local_chunk=0, decays=True, padded=True, length=33, batch=1, heads=1, key_heads=1, compute_chunk=16),
    Case(
        power=1, local_chunk=0, features=40, length=40, batch=1, heads=1, key_heads=1, normalize=False, compute_chunk=24
    ),
    Case(local_chunk=20, degree=2, length=41, batch=1, heads=1, key_heads=1, normalize=False),
    Case(local_chunk=40, degree=6, length=63, batch=1, heads=2, key_heads=1, offset=0.0),
    Case(features=48, length=1, batch=1, heads=1, key_heads=1),
    Case(features=40, length=33, batch=1, heads=1, key_heads=1),
    Case(power=1, local_chunk=0, features=150, length=33, batch=1, heads=1, key_heads=1, compute_chunk=16),
    Case(block_size=4, length=37, batch=1, heads=1, key_heads=1),
    Case(block_size=12, local_chunk=0, length=65, padded=True, batch=1, heads=2, key_heads=1),
    Case(block_size=24, power=1, factors=2, local_chunk=24, length=45, batch=1, heads=1, key_heads=1),
    Case(block_size=32, length=75, batch=1, heads=1, key_heads=1),
    Case(causal=False, length=20, batch=1, heads=1, key_heads=1, padded=True),
    Case(causal=False, power=1, local_chunk=0, length=33, batch=1, heads=2, key_heads=1, padded=True),
    Case(causal=False, local_chunk=0, length=35, batch=1, heads=2, key_heads=1, normalize=False),
    Case(power=1, factors=2, local_chunk=0, decays=True, length=37, batch=1, heads=2, key_heads=1, compute_chunk=16),
    Case(power=1, factors=2, features=36, padded=True, length=37, batch=1, heads=1, key_heads=1),
    Case(power=1, factors=2, causal=False, local_chunk=0, length=35, batch=1, heads=2, key_heads=1),
]
PLAIN, DECAYED, LINEAR, FACTORS = CASES[1], CASES[2], CASES[5], CASES[19]
SMALL = replace(PLAIN, heads=1, length=33)
WITH_HISTORY = [
    Case(length=33, history=21, batch=1, heads=2, key_heads=1),
    Case(length=5, history=13, decays=True, batch=2, heads=1, key_heads=1),
    Case(power=1, local_chunk=16, length=33, history=16, decays=True, padded=True, batch=1, heads=2, key_heads=1),
    Case(local_chunk=0, length=33, history=21, decays=True, batch=1, heads=1, key_heads=1),
    Case(power=1, factors=2, local_chunk=0, length=33, history=21, decays=True, batch=1, heads=1, key_heads=1),
]
FEW = [*(CASES[place] for place in (1, 5, 7, 9, 12, 16, 18, 19, 20)), WITH_HISTORY[2]]
"""Every option, both powers, with and without chunks, and chunks narrower and wider than blocks."""


BLOCKS = {
    "linear_fold": {"ROWS": 128, "COLUMNS": 16, "TOKENS": 32, "FLAT": 1},
    "linear_outputs": {"QUERIES": 32, "KEYS": 32, "COLUMNS": 16, "ROWS": 128, "DEPTH": 16},
    "linear_upstream": {"TOKENS": 64},
    "linear_sums_gradient": {"TOKENS": 32, "ROWS": 128},
    "linear_inner_query_gradient": {"QUERIES": 32, "KEYS": 32, "DEPTH": 16},
    "linear_inner_key_gradient": {"QUERIES": 32, "KEYS": 32, "DEPTH": 16},
}
"""Few programs, for each instruction of each is interpreted; and still several blocks of everything."""


@pytest.fixture(autouse=True)
def _few_programs():
    with forced(**BLOCKS):
        yield


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


assert_triton_agrees = partial(assert_precision_agrees, backend="triton")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FEW else pytest.mark.full) for case in CASES + WITH_HISTORY],
    ids=str,
)
def test_programs_agree_with_the_reference(case):
    assert_triton_agrees(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(case, batch=1), marks=[] if quick else pytest.mark.full)
        for case, quick in ((FACTORS, True), (LINEAR, True), (DECAYED, False), (PLAIN, False), (WITH_HISTORY[0], False))
    ],
    ids=str,
)
def test_a_sequence_in_spans_agrees_with_the_reference(case, launched):
    """Each begins with the sums of those before it, which decay; gradients come from the last one back."""
    with launches.spans_of(1 if case.local_chunk else 2):
        assert_triton_agrees(case)
    assert launched.count("linear_fold") > launched.count("linear_outputs") + launched.count("linear_sums_gradient")


@pytest.mark.full
@pytest.mark.parametrize("case", [SMALL, pytest.param(replace(LINEAR, batch=1), marks=pytest.mark.full)], ids=str)
def test_other_blocks_change_nothing(case):
    """Narrower than features, values and chunks, or wider than all of them; and the loops of another device."""
    narrow = {"ROWS": 64, "QUERIES": 16, "KEYS": 16, "TOKENS": 16, "FLAT": 0}
    wide = {"ROWS": 256, "QUERIES": 64, "KEYS": 64, "TOKENS": 64, "COLUMNS": 64, "DEPTH": 64}
    for sizes in (narrow, wide):
        changed = {program: use | {name: sizes.get(name, use[name]) for name in use} for program, use in BLOCKS.items()}
        with forced(**changed):
            assert_triton_agrees(case)


@pytest.mark.full
def test_what_does_not_fit_into_scratch_memory_at_once_takes_turns(monkeypatch):
    """A head at a time, and a row at a time; to the same bits: heads do not know of one another."""
    case = replace(PLAIN, length=5, local_chunk=4, features=12, batch=2, heads=2, key_heads=2, dtype=torch.float32)
    tensors = make(case)
    expected = gradients(case, tensors, "triton")
    cut, counts = launcher._parts, []
    monkeypatch.setattr(launcher, "_parts", lambda *call: (counts.append(len(list(cut(*call)))), cut(*call))[1])
    for size, parts in ((1, 4), (50_000, 2)):
        monkeypatch.setattr(launcher, "SCRATCH_BYTES", size)
        counts.clear()
        found = gradients(case, tensors, "triton")
        assert set(counts) == {parts}
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "case", [SMALL, *(pytest.param(case, marks=pytest.mark.full) for case in (PLAIN, CASES[2], CASES[4]))], ids=str
)
def test_half_precision_is_as_good_as_its_own_rounding(case):
    """float16 inputs against float64 on the same numbers; sums and weights may leave the range of float16."""
    rounded = make(replace(case, dtype=torch.float16))
    doubled = rounded.map(lambda x: x if x.dtype == torch.bool else x.double())
    assert_same(gradients(case, rounded, "triton"), gradients(case, doubled, "reference"), 2e-3)


@pytest.mark.parametrize("degree", [2, pytest.param(62, marks=pytest.mark.full), 66])
def test_any_degree_is_taken(degree):
    assert_triton_agrees(Case(degree=degree, length=20, batch=1, heads=1, key_heads=1, local_chunk=32), tolerance=1e-4)


def test_a_decay_of_minus_infinity_forgets_all_before():
    case = replace(DECAYED, dtype=torch.float32)
    tensors = make(case)
    tensors.log_decay[:, :, 20] = -torch.inf
    whole, rest = run(case, tensors, backend="triton").output, tensors.span(20, case.length)
    assert torch.allclose(whole[:, :, 20:], run(case, rest, backend="triton").output, rtol=1e-4, atol=1e-6)


def test_sums_beyond_the_range_of_half_precision_stay_finite():
    case = Case(length=20, batch=1, heads=1, key_heads=1, local_chunk=0, compute_chunk=8, dtype=torch.float64)
    tensors = make(case)
    large = replace(tensors, query=tensors.query * 40, key=tensors.key * 40).map(torch.Tensor.half)
    doubled = large.map(torch.Tensor.double)
    assert doubled.key.square().sum() ** 2 > 65_504
    assert_same(gradients(case, large, "triton"), gradients(case, doubled, "reference"), 5e-3)


@pytest.mark.parametrize("view", first_always(["tokens before heads", "every second column"]))
def test_any_strides_are_taken(view):
    case = Case(length=9, batch=2, heads=2, key_heads=2, local_chunk=4, features=12, dtype=torch.float32)
    tensors = make(case)
    if view == "tokens before heads":
        strided = tensors.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    else:
        strided = tensors.map(lambda x: x.repeat_interleave(2, -1)[..., ::2])
    found, expected = run(case, strided, backend="triton").output, run(case, tensors, backend="triton").output
    assert torch.equal(found, expected)


def test_it_is_an_operator():
    """Schema, fake kernel and gradients as torch.library promises them."""
    query, key, value = (torch.randn(1, 1, 5, width).requires_grad_() for width in (5, 5, 3))
    arguments = (query, key, value, *[None] * 6, 2, 1, True, 1.0, True, 2, 16, 1, False, "triton")
    torch.library.opcheck(torch.ops.polysketch.linear_attention.default, arguments)


def test_it_is_refused_where_it_cannot_run():
    wide, narrow = torch.randn(1, 1, 4, 129), torch.randn(1, 1, 4, 8)
    assert ops.linear_attention_backend(narrow, narrow, narrow, backend="triton") == "triton"
    with pytest.raises(RuntimeError, match="values up to 128 wide, got 129"):
        ops.linear_attention(narrow, narrow, wide, backend="triton")
    with pytest.raises(RuntimeError, match="float64"):
        ops.linear_attention(narrow.double(), narrow.double(), narrow.double(), backend="triton")
    with pytest.raises(RuntimeError, match="bfloat16"):
        ops.linear_attention(narrow.bfloat16(), narrow.bfloat16(), narrow.bfloat16(), backend="triton")


MUTANTS = {
    "the prefix is not read": ("linear_outputs", "if not (SKIP_FIRST and index == 0)", "if False", PLAIN),
    "the first chunk reads sums of nothing": ("linear_outputs", "index == 0", "index == 1", PLAIN),
    "what a query sees ends one early": ("linear_outputs", "[:, None] >= key_place", "[:, None] > key_place", PLAIN),
    "weights in a chunk count twice": ("linear_outputs", "L), weight, 0.0)", "L), weight * 2, 0.0)", PLAIN),
    "the denominator is not added up": ("linear_outputs", "denominator += tl.sum(weight, 1)", "pass", PLAIN),
    "off-diagonal products count once": (
        "linear_fold",
        "first == second, 1.0, 2.0",
        "first == second, 1.0, 1.0",
        PLAIN,
    ),
    "a chunk is folded before it is kept": ("linear_fold", "item % steps == 0", "item % steps == steps - 1", PLAIN),
    "sums do not decay": ("linear_fold", "total *= decay", "pass", DECAYED),
    "normalizers do not decay": ("linear_fold", "normalizer *= decay", "pass", DECAYED),
    "weights in a chunk do not decay": ("linear_outputs", "weight *= tl.exp", "weight *= 1 + 0 * tl.exp", DECAYED),
    "squares have half of their slope": ("linear_sums_gradient", "other == tile, 2.0", "other == tile, 1.0", PLAIN),
    "mirrored tiles are not turned": ("linear_sums_gradient", "other <= tile, straight", "other <= 9, straight", PLAIN),
    "gradients of denominators are lost": ("linear_sums_gradient", "mass -= tl.sum", "mass -= 0 * tl.sum", PLAIN),
    "one query head of a group is heard": ("linear_inner_gradient", "+ item // queries", "+ 0", PLAIN),
    "the second factor is dropped": ("linear_outputs", "if INNER_FACTORS == 2", "if INNER_FACTORS == 3", FACTORS),
    "gradients of factors are exchanged": ("linear_inner_gradient", "(change * other)", "(change * score)", FACTORS),
    "the second half meets ones": ("linear_sums_gradient", "change * first[:, :, None], 1", "change, 1", FACTORS),
    "a half's entries meet themselves": ("linear_fold", "of_x + HALF, tokens", "of_x, tokens", FACTORS),
    "what is there is not added to": ("linear_inner_gradient", "    if ADD:", "    if False:", DECAYED),
}
MUTANTS_IN_SPANS = {
    "a span begins anew": ("linear_fold", "range(own_span)", "range(0)"),
    "a span does not decay": ("linear_fold", "                total *= decay", "                pass"),
    "normalizers of a span do not decay": ("linear_fold", "before *= decay", "pass"),
    "a span begins with the first one's sums": ("linear_fold", "+ number_before", "+ 0"),
    "every span goes through the same chunks": ("linear_fold", "turn = first_turn + item", "turn = item"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    *mutant, case = MUTANTS[name]
    break_program(*mutant, monkeypatch, tmp_path)
    with pytest.raises(AssertionError, match="relative errors beyond"):
        assert_triton_agrees(case)


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS_IN_SPANS)
def test_a_broken_program_is_caught_in_spans(name, monkeypatch, tmp_path):
    break_program(*MUTANTS_IN_SPANS[name], monkeypatch, tmp_path)
    with launches.spans_of(1), pytest.raises(AssertionError, match="relative errors beyond"):
        assert_triton_agrees(replace(FACTORS, batch=1))


def break_program(program: str, line: str, broken: str, monkeypatch, tmp_path) -> None:
    module = importlib.import_module(f"polysketch.ops.linear.triton.programs.{program.removeprefix('linear_')}")
    source = Path(module.__file__).read_text()
    assert line in source
    path = tmp_path / f"{program}.py"
    path.write_text(source.replace(line, broken))
    spec = importlib.util.spec_from_file_location(program, path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    for kernel in [kernel for kernel in vars(module) if kernel.startswith("linear_")]:
        monkeypatch.setattr(module, kernel, getattr(mutant, kernel))
