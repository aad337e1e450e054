"""A token decoded by the programs equals PyTorch's step, output and state, whatever the position of each row."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.covering import first_always
from generation.recording import recorded, split_positions
from ops.linear_cases import Case, Tensors, arguments, assert_same, empty_state, make, relative_error, run
from polysketch import ops
from polysketch.generation import captured
from polysketch.generation.captured import CapturedStep
from polysketch.models import ModelConfig, TransformerLM
from polysketch.ops.linear import decode
from polysketch.ops.linear.checks import checked
from polysketch.ops.linear.triton.decoding import extend_one_, why_not_extend
from polysketch.ops.triton import forced
from polysketch.ops.triton.launch import launching

PLAIN = Case(length=7, batch=1, heads=1, key_heads=1, features=6, head_dim=5, value_dim=3, local_chunk=3)
CASES = [
    PLAIN,
    replace(PLAIN, decays=True, heads=2, batch=2),
    replace(PLAIN, decays=True, local_chunk=0, heads=2, length=3),
    replace(PLAIN, power=1, local_chunk=0, normalize=False, length=3),
    replace(PLAIN, power=1, local_chunk=5, decays=True, features=20, key_heads=2, heads=2, degree=2),
    replace(PLAIN, features=20, local_chunk=5, offset=0.0, length=6),
    replace(PLAIN, local_chunk=1, length=3, decays=True, normalize=False, batch=2),
    replace(PLAIN, local_chunk=0, value_dim=20, batch=2, key_heads=2, heads=4, length=2),
    replace(PLAIN, power=1, factors=2, local_chunk=0, features=28, decays=True, heads=2, length=2),
    replace(PLAIN, power=1, factors=2, decays=True, length=5),
]
# More than one block of every kind: of a pair of tiles, of the chunk's slots, of its folded tokens.
SMALL = {
    "linear_extend": {"ROWS": 128, "TOKENS": 2, "FOLDED": 4, "num_warps": 4, "num_stages": 1},
    "linear_extend_finish": {"PARTS_AT_ONCE": 4, "num_warps": 4, "num_stages": 1},
}


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    with forced(**SMALL):
        yield
    torch.use_deterministic_algorithms(False)


def on_a_device(state: ops.LinearAttentionState) -> ops.LinearAttentionState:
    """With positions of the device's own: the programs may look at those alone."""
    state.device_position = state.position.clone()
    return state


def step(case: Case, one: Tensors, state: ops.LinearAttentionState) -> tuple[Tensor, Tensor]:
    """Output and denominator of one token by the programs."""
    call = {"causal": True, "block_size": None, "state": state, "return_state": True, "compute_chunk": None}
    return extend_one_(*checked(one.query, one.key, one.value, **arguments(case, one), **call), state)


def started(case: Case) -> ops.LinearAttentionState:
    """A state whose rows, where there are several, stand at different positions."""
    first = make(replace(case, seed=1), 4)
    first.key_mask = torch.tensor([[True] * 4, [False] * 2 + [True] * 2][: case.batch])
    return run(case, first, backend="reference", state=empty_state(case), return_state=True).state


def parts(state: ops.LinearAttentionState) -> dict[str, Tensor]:
    return {name: x.double() for name, x in state.tensors().items() if x.numel()}


def assert_steps_agree(case: Case, tolerance: float = 1e-5) -> None:
    """Every token of a case, from a state at the reference's hands: outputs and states after each."""
    exact = replace(case, dtype=torch.float64)
    tensors = make(case)
    state, expected_state = on_a_device(started(case)), started(exact)
    addresses = {name: x.data_ptr() for name, x in state.tensors().items()}
    for token in range(case.length):
        one = tensors.span(token, token + 1)
        wide = one.map(lambda x: x.double())
        expected = ops.linear_attention_extend_(
            wide.query, wide.key, wide.value, expected_state, **arguments(exact, wide)
        )
        found, denominator = step(case, one, state)
        assert found.dtype == case.dtype
        assert relative_error(found, expected.output) < tolerance
        assert relative_error(denominator, expected.denominator) < tolerance
        assert_same(parts(state), parts(expected_state), tolerance)
        assert state.device_position.tolist() == expected_state.position.tolist()
    assert {name: x.data_ptr() for name, x in state.tensors().items()} == addresses


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_those_of_plain_pytorch(case):
    assert_steps_agree(replace(case, dtype=torch.float32))


@pytest.mark.parametrize("case", [CASES[1], replace(CASES[2], length=2)], ids=str)
def test_sums_in_half_precision_are_read_and_rounded_once(case):
    case = replace(case, dtype=torch.float32)
    tensors, state = make(case), on_a_device(started(case).with_sums_in(torch.float16))
    for token in range(case.length):
        one, wide = tensors.span(token, token + 1), on_a_device(state.with_sums_in(torch.float32).clone())
        found, denominator = step(case, one, state)
        expected, mass = step(case, one, wide)
        assert torch.equal(found, expected)
        assert torch.equal(denominator, mass)
        assert_same(parts(state), parts(wide.with_sums_in(torch.float16)), 0.0)


@pytest.mark.parametrize("case", first_always([replace(CASES[5], length=2), CASES[8], CASES[1], CASES[2]], 2), ids=str)
def test_rows_of_a_pool_move_on_where_they_lie(case):
    case, rows = replace(case, dtype=torch.float32, batch=2), torch.tensor([3, 1])
    alone = on_a_device(started(case))
    own = {name: x for name, x in alone.tensors().items() if name != "position"}
    pages = {name: x.new_full((5, x[0].numel() + 3), float("nan")) for name, x in own.items()}
    views = {name: x[:, : x.shape[1] - 3].unflatten(1, own[name].shape[1:]) for name, x in pages.items()}
    for name, view in views.items():
        view[rows] = getattr(alone, name)
    pool = replace(alone, **views, position=torch.zeros(5, dtype=torch.int64))
    some = ops.StateRows(pool, rows, alone.position.clone())
    some.device_position = some.position.clone()
    tensors = make(case)
    for token in range(case.length):
        one = tensors.span(token, token + 1)
        for found, expected in zip(step(case, one, some), step(case, one, alone), strict=True):
            assert torch.equal(found, expected)
    assert some.device_position.tolist() == alone.device_position.tolist()
    for name, page in pages.items():
        assert torch.equal(views[name][rows], getattr(alone, name)), name
        assert bool(page[[0, 2, 4]].isnan().all()), name
        assert bool(page[:, -3:].isnan().all()), name


def test_half_precision_is_rounded_once():
    """Inputs and output are float16, everything between float32."""
    assert_steps_agree(replace(CASES[1], dtype=torch.float16, length=3), tolerance=2e-3)


def test_any_strides_will_do():
    case = replace(CASES[1], dtype=torch.float32)
    one = make(case, 1)
    strided = one.map(lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1))
    state, other = on_a_device(started(case)), on_a_device(started(case))
    assert torch.equal(step(case, one, state)[0], step(case, strided, other)[0])
    assert_same(parts(state), parts(other), 0.0)


def test_positions_on_the_host_decide_nothing():
    """They are counted, and not looked at: a graph replays what was launched at another position."""
    case = replace(CASES[1], dtype=torch.float32)
    one = make(case, 1)
    state, other = on_a_device(started(case)), on_a_device(started(case))
    other.position += 5
    assert torch.equal(step(case, one, state)[0], step(case, one, other)[0])
    assert torch.equal(state.device_position, other.device_position)
    assert torch.equal(state.position + 5, other.position)


def test_the_operator_says_what_it_changes():
    """For those who trace; the programs alone are called otherwise."""
    case = replace(PLAIN, dtype=torch.float32)
    one, state = make(case, 1), on_a_device(started(case))
    vectors = [x[:, :, 0] for x in (one.query, one.key, one.value, one.local_query, one.local_key)]
    kept = list(state.tensors().values())[:7]
    torch.library.opcheck(
        torch.ops.polysketch.linear_attention_extend.default,
        (*vectors, None, *kept, state.device_position, None, 2, 1, 4, 1.0, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_states_that_the_programs_cannot_take_are_named():
    case = replace(PLAIN, dtype=torch.float64)
    assert "in float32 and half" in (why_not_extend(make(case, 1).value, empty_state(case)) or "")
    case = replace(PLAIN, dtype=torch.float32, batch=2)
    state = empty_state(case)
    assert why_not_extend(state.sums, state) is None
    state.open_key = state.open_key.mT.contiguous().mT
    assert "in one piece" in (why_not_extend(state.sums, state) or "")


@torch.inference_mode()
def test_a_captured_step_of_a_whole_model_serves_every_token(monkeypatch):
    """Recorded once and replayed over the ends of chunks, by rows at different positions."""
    torch.manual_seed(0)
    options = {"local_chunk": 4, "learned": False, "sketch_size": 8, "decay_gate": True, "hidden_size": 16}
    config = ModelConfig(20, 1, 16, 2, num_kv_heads=1, attention="polysketch-paper", attention_options=options)
    model = TransformerLM(config).eval()
    expected_state, state = model.init_state(2), split_positions(model.init_state(2))
    monkeypatch.setattr(decode, "_by_triton", lambda value, state: state.device_position is not state.position)
    assert model.why_not_captured(state) is None
    replayed = CapturedStep(model, state, recorded(state, launching))
    mask = torch.tensor([[True, True, True], [False, False, True]])
    ids = torch.tensor([[3, 1, 4], [0, 0, 5]])
    for each in (expected_state, state):
        model.extend_hidden(ids, each, key_mask=mask)
    addresses = captured._addresses(state)
    for token in range(6):
        chosen = torch.tensor([token, 19 - token])
        expected, _ = model.extend(chosen[:, None], expected_state)
        torch.testing.assert_close(replayed(chosen), expected[:, 0], rtol=1e-4, atol=1e-5)
        assert_same(parts(state.layers[0]), parts(expected_state.layers[0]), 1e-4)
    assert captured._addresses(state) == addresses
    assert state.layers[0].device_position.tolist() == state.device_position.tolist() == [9, 7]
