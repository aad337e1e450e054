"""The Triton programs of the delta rule compute what the reference defines: writes, gradients, behind a state."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.covering import first_always
from polysketch import ops
from polysketch.ops.delta import operator
from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear.backends import BACKENDS as LINEAR_BACKENDS
from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.triton import availability, configurations, forced, self_check
from polysketch.ops.triton.launch import launching

CHUNK = 16
BLOCKS = {
    "delta_errors": {"CHUNK": CHUNK, "ROWS": 32, "COLUMNS": 16, "num_warps": 4, "num_stages": 1},
    "delta_inverse": {"DEPTH": 16, "JOINED": 0, "num_warps": 4, "num_stages": 1},
}
"""Several chunks, pieces of the sums and blocks of columns at sizes that the interpreter can do."""
HEADS = 2


class Case(NamedTuple):
    """Sizes of a call: halves of 11 features are pieces of 4 by 8, three by two of them, the last ones not full."""

    length: int = 3 * CHUNK + 5
    factors: int = 2
    features: int = 22
    width: int = 5
    continued: bool = True
    batch: int = 1


ONE_FACTOR = Case(factors=1, features=37)


@pytest.fixture(autouse=True)
def _small_blocks():
    with forced(**BLOCKS):
        yield


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    """Keys of length one, which lean toward each other so that every token changes what all later ones write."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, HEADS, *shape, generator=generator, dtype=torch.float64)

    parts = (draw(case.length, case.features) + 0.5).unflatten(-1, (case.factors, -1))
    value, strength = draw(case.length, case.width), draw(case.length).sigmoid()
    sums = draw(expanded_size(case.features, 1, case.factors), case.width) if case.continued else None
    key = F.normalize(parts, dim=-1).flatten(-2)
    return Inputs(*(None if x is None else x.to(dtype) for x in (key, value, strength, sums)))


def written(inputs: Inputs, factors: int, backend: str = "triton") -> Tensor:
    """The op's result."""
    state = None
    if inputs.sums is not None:
        sizes = (*inputs.key.shape[:2], inputs.key.shape[3], inputs.value.shape[3])
        state = ops.LinearAttentionState.init(*sizes, factors=factors, dtype=inputs.sums.dtype)
        state.sums = inputs.sums
    return ops.delta_writes(*inputs[:3], factors=factors, state=state, backend=backend)


def with_gradients(inputs: Inputs, factors: int, backend: str = "triton") -> list[Tensor]:
    """The result, and the gradients of all inputs under a cotangent."""
    leaves = Inputs(*(None if x is None else x.clone().requires_grad_() for x in inputs))
    output = written(leaves, factors, backend)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, options = [x for x in leaves if x is not None], {"allow_unused": True, "materialize_grads": True}
    return [output.detach(), *torch.autograd.grad(output, wanted, cotangent.to(output.dtype), **options)]


def assert_agrees(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Result and gradients are those of the reference in float64, of the same numbers."""
    inputs = made(case, dtype)
    found = with_gradients(inputs, case.factors)
    expected = with_gradients(Inputs(*(None if x is None else x.double() for x in inputs)), case.factors, "reference")
    errors = [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(found, expected, strict=True)]
    allowed = 5e-3 if dtype == torch.float16 else 3e-6  # gradients come in the dtype of the inputs
    assert all(error < allowed for error in errors), f"relative errors beyond {allowed}: {errors}"


@pytest.mark.parametrize("length", first_always([3 * CHUNK + 5, CHUNK, 1, CHUNK - 1, CHUNK + 1], 3))
@pytest.mark.parametrize(
    "case",
    first_always([Case(), ONE_FACTOR._replace(continued=False), ONE_FACTOR, Case(continued=False)], 2),
    ids=str,
)
def test_programs_agree_with_the_reference(case, length):
    assert_agrees(case._replace(length=length))


@pytest.mark.parametrize(
    "case",
    first_always(
        [
            Case(width=1, length=20),
            Case(factors=1, features=1, length=20),
            Case(features=16, width=16, length=20, batch=2),
            Case(width=33, length=20),
            Case(features=2, length=20),
            Case(factors=1, features=64, width=17, length=20, batch=2),
        ],
        3,
    ),
    ids=str,
)
def test_any_widths_are_taken(case):
    assert_agrees(case)


@pytest.mark.full
@pytest.mark.parametrize("case", first_always([ONE_FACTOR._replace(length=70), Case(length=70)]), ids=str)
def test_other_blocks_change_nothing(case):
    """Wider than features and values, a chunk that is not the first; and what is shipped."""
    with forced(delta_errors={**BLOCKS["delta_errors"], "CHUNK": 64, "ROWS": 128, "COLUMNS": 32}):
        assert_agrees(case)
    with forced(delta_errors={**BLOCKS["delta_errors"], "CHUNK": 32, "ROWS": 16}):
        assert_agrees(case)


def test_the_shipped_configurations_agree_with_the_reference(monkeypatch):
    monkeypatch.setattr(configurations, "_forced", {})
    assert_agrees(Case(length=70))


def test_half_precision_is_computed_in_float32():
    case = Case(length=CHUNK + 2)
    assert_agrees(case, torch.float16)
    inputs = made(case, torch.float16)
    assert written(inputs, 2).dtype == torch.float32
    assert torch.equal(written(inputs, 2), written(Inputs(*(x.float() for x in inputs)), 2))


@pytest.mark.parametrize("case", first_always([Case(length=CHUNK + 5), ONE_FACTOR]), ids=str)
def test_tokens_of_strength_zero_change_nothing(case):
    inputs = made(case)
    kept = [token for token in range(case.length) if token not in (0, 7, CHUNK, case.length - 1)]
    strength = torch.zeros_like(inputs.strength)
    strength[:, :, kept] = inputs.strength[:, :, kept]
    found = written(inputs._replace(strength=strength), case.factors)
    rows = [x[:, :, kept] for x in inputs[:3]]
    expected = written(Inputs(*rows, inputs.sums), case.factors)
    assert found.count_nonzero() == expected.numel()
    torch.testing.assert_close(found[:, :, kept], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", first_always([2 * CHUNK + 5, 1, CHUNK]))
def test_in_reverse_is_what_turned_copies_give(length):
    inputs = made(Case(length=length))
    backend = operator.BACKENDS["triton"]
    turned = Inputs(*(x.flip(2) for x in inputs[:3]), inputs.sums)
    assert torch.equal(backend.errors_in_reverse(inputs, 2, None), backend.errors(turned, 2, None).flip(2))


def test_any_strides_are_taken():
    inputs = made(Case(batch=2, length=5, features=6))
    expected = with_gradients(inputs, 2)
    between = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    apart = [x.repeat_interleave(2, -1)[..., ::2] for x in inputs[:3]]
    for rows in (between, apart):
        assert rows[0].stride() != inputs.key.stride()
        strided = Inputs(*rows, inputs.sums.mT.contiguous().mT)
        leaves = [x.requires_grad_() for x in strided]
        output = written(strided, 2)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = [output.detach(), *torch.autograd.grad(output, leaves, cotangent.float())]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def programs_everywhere():
    """A CPU that "auto" takes for a device of the programs."""
    availability.AUTO_DEVICES.add("cpu")
    yield
    availability.AUTO_DEVICES.discard("cpu")


@pytest.mark.full
@pytest.mark.usefixtures("programs_everywhere")
def test_forward_and_backward_run_programs_alone(monkeypatch, tmp_path):
    """Where "auto" picks programs, the sums of the gradients are theirs too, and nothing is plain PyTorch."""
    inputs = made(Case(length=20))
    expected = with_gradients(inputs, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_answers", {})
    with_gradients(inputs, 2, "auto")  # programs are checked, against plain PyTorch
    for table in (operator.BACKENDS, LINEAR_BACKENDS):
        monkeypatch.setitem(table, "chunked", None)
        monkeypatch.setitem(table, "native", None)
    launched: list[str] = []

    def launch(kernel, programs, arguments, options):
        launched.append(kernel.__name__)
        kernel[(programs,)](*arguments, **options)

    with launching(launch):
        found = with_gradients(inputs, 2, "auto")
    assert launched[:4] == ["delta_inverse", "delta_errors"] * 2
    assert "linear_sums_gradient" in launched
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.full  # the same operator passes opcheck in tests/ops
def test_it_is_an_operator():
    """Schema, fake kernel and gradients as torch.library promises them."""
    inputs = made(Case(length=5, features=4))
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(torch.ops.polysketch.delta_writes.default, (*leaves, 2, "triton", None))
    plain = [x.detach() for x in leaves]
    outputs = torch.ops.polysketch.delta_writes(*plain, 2, "triton", None)
    arguments = (torch.randn_like(outputs[0]), *outputs, *plain, 2, "triton", None)
    shapes = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.polysketch.delta_writes_backward.default, arguments, test_utils=shapes)


def test_an_empty_batch_gives_an_empty_result():
    found = with_gradients(Inputs(*(x[:0] for x in made(Case(length=20)))), 2)
    assert [x.shape[0] for x in found] == [0] * 5


def test_it_is_refused_where_it_cannot_run():
    inputs = made(Case(length=4))
    assert ops.delta_writes_backend(inputs.key, backend="triton") == "triton"
    assert ops.delta_writes_backend(inputs.key) != "triton"
    with pytest.raises(RuntimeError, match="float64"):
        written(made(Case(length=4), torch.float64), 2)


MUTANTS = {
    "the last chunk is not written": ("errors", "writing, written, held", "writing, 0 * written, held"),
    "nothing is read": ("errors", "asking, held, answer", "asking, 0 * held, answer"),
    "sums are not kept": ("errors", "tl.store(sums + piece * PIECE, held)\n            answer", "answer"),
    "pieces share their rows": ("errors", "= _of_piece(piece, FEATURES", "= _of_piece(0, FEATURES"),
    "the strength is dropped": ("errors", "other=0.0)[:, None]\n", "other=0.0)[:, None] * 0 + error\n"),
    "the state is dropped": ("errors", "held = initial_piece(", "held = 0 * initial_piece("),
    "a state's rows are turned": ("errors", "first[:, None] * HALF + second", "first[:, None] + HALF * second"),
    "values do not advance": ("errors", "value += CHUNK", "value += 0"),
    "strengths do not advance": ("errors", "strength += CHUNK", "strength += 0"),
    "all chunks have one system": ("errors", "inverse += CHUNK * CHUNK", "inverse += 0"),
    "a token sees itself": ("inverse", "places[:, None] > places", "places[:, None] >= places"),
    "the second factor is dropped": ("inverse", "if FACTORS == 2", "if FACTORS == 3"),
    "only pairs of tokens count": ("inverse", "line += tl.sum(line[:, None] * found, 0)", "pass"),
    "the last row is not solved": ("inverse", "range(1, CHUNK)", "range(1, CHUNK - 1)"),
    "a writer's strength is its reader's": ("inverse", "share[None, :]", "share[:, None]"),
    "the diagonal is missing": ("inverse", "1.0, 0.0)\n", "0.0, 0.0)\n"),
    "only neighbours are joined": ("inverse", "range(1, levels_of(CHUNK))", "range(0)"),
    "halves of the chunk are not joined": ("inverse", "levels_of(CHUNK))", "levels_of(CHUNK) - 1)"),
    "a pair's inverse is its parts'": ("inverse", "tl.dot(found, rest", "0 * tl.dot(found, rest"),
    "single tokens are not joined": ("inverse", " - within_pairs(strict, 0", " - 0 * within_pairs(strict, 0"),
}  # fmt: skip
JOINED = {**BLOCKS["delta_inverse"], "JOINED": 1}


def assert_agrees_by_either_inverse() -> None:
    """By rows substituted and by blocks joined."""
    for use in (BLOCKS["delta_inverse"], JOINED):
        with forced(delta_inverse=use):
            assert_agrees(Case(length=2 * CHUNK + 5))


def test_blocks_joined_are_the_rows_substituted():
    assert_agrees_by_either_inverse()


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    program, line, broken = MUTANTS[name]
    module = importlib.import_module(f"polysketch.ops.delta.triton.programs.{program}")
    source = Path(module.__file__).read_text()
    assert line in source
    path = tmp_path / f"{program}.py"
    path.write_text(source.replace(line, broken))
    spec = importlib.util.spec_from_file_location(program, path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(module, f"delta_{program}", getattr(mutant, f"delta_{program}"))
    with pytest.raises(AssertionError, match="relative errors beyond"):
        assert_agrees_by_either_inverse()
