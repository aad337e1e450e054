"""Decoding by `polysketch`: the program of one token computes what plain PyTorch does, and leaves the same state."""

import copy
import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polysketch import attention, ops
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.window_state import WindowState
from polysketch.ops.delta import one_token
from polysketch.ops.native import build, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SOURCE = Path(build.__file__).parent / "source"
HIDDEN = 12
CASES = {
    "as built": {},
    "queries share keys": {"num_kv_heads": 2},
    "sketches of both vectors, no norms": {"sketched": "both", "normed": False},
    "sketches of rotated vectors": {"sketched": "rotated"},
    "without the layer's input": {"hidden_size": None, "num_kv_heads": 1},
    "a window of one token": {"window": 1},
}


def made(num_kv_heads: int = 4, **options) -> attention.PolysketchAttention:
    """Heads of 20, sketches of 5: no whole vectors; and every parameter carries weight."""
    torch.manual_seed(3)
    options = {"window": 7, "sketch_size": 5, "hidden_size": HIDDEN, **options}
    mechanism = attention.build("polysketch", num_heads=4, head_dim=20, num_kv_heads=num_kv_heads, **options)
    assert isinstance(mechanism, attention.PolysketchAttention)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mechanism


def tokens(
    mechanism: attention.PolysketchAttention, length: int, dtype=torch.float32, rows: int = 3
) -> dict[str, Tensor]:
    """Inputs of `extend`, with heads and tokens in turn as a layer has them."""
    drawn = torch.Generator().manual_seed(length)

    def rand(heads: int, width: int) -> Tensor:
        return torch.randn(rows, length, heads, width, generator=drawn).to(dtype).transpose(1, 2)

    heads, of_keys = mechanism.num_heads, mechanism.num_kv_heads
    found = {"query": rand(heads, 20), "key": rand(of_keys, 20), "value": rand(of_keys, 20)}
    unrotated = rand(heads, 20), rand(of_keys, 20)
    return {**found, "unrotated": unrotated, "hidden": rand(1, HIDDEN)[:, 0]}


def part(given: dict, first: int, last: int) -> dict:
    """Some of the tokens."""
    heads = {name: given[name][:, :, first:last] for name in ("query", "key", "value")}
    unrotated = tuple(x[:, :, first:last] for x in given["unrotated"])
    return {**heads, "unrotated": unrotated, "hidden": given["hidden"][:, first:last]}


def in_steps(
    mechanism, given: dict, before: int = 1, state: WindowState | None = None
) -> tuple[list[Tensor], WindowState]:
    """The tokens one by one, after some at once."""
    rows, length = given["query"].shape[0], given["query"].shape[2]
    if state is None:
        state = mechanism.init_state(rows)
    outputs = []
    for first, last in [(0, before), *((place, place + 1) for place in range(before, length))]:
        output, state = mechanism.extend(**part(given, first, last), state=state)
        outputs.append(output)
    return outputs, state


def tensors_of(state: WindowState) -> dict[str, Tensor]:
    assert state.recent.held is not None
    kept = dict(zip(("key", "value", "real"), state.recent.held, strict=True))
    return {**kept, "position": state.position, **{f"far {name}": x for name, x in state.far.tensors().items()}}


def assert_exact(options: dict, before: int = 1, removed: bool = False) -> None:
    """Outputs and state are those of float64, which has no program."""
    mechanism = made(**options)
    if removed:
        mechanism.remove_prefix()
    given = tokens(mechanism, 20)
    found, state = in_steps(mechanism, given, before)
    exact = copy.deepcopy(mechanism).double()
    expected, wide = in_steps(exact, tokens(exact, 20, torch.float64), before)
    pairs = [
        *zip(found, expected, strict=True),
        *zip(tensors_of(state).values(), tensors_of(wide).values(), strict=True),
    ]
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other.double(), rtol=1e-4, atol=2e-5), "beyond rounding"


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """An entry for every call of the program."""
    found, real = [], one_token.extend_one_

    def counted(*arguments, **options):
        found.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(one_token, "extend_one_", counted)
    return found


@pytest.mark.parametrize("before", [1, 3, 12])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_state_are_those_of_the_definition(name, before, calls):
    assert_exact(CASES[name], before)
    assert len(calls) == 20 - before


def test_a_removed_prefix_stays_removed(calls):
    assert_exact({}, removed=True)
    assert calls


def test_threads_share_heads_and_change_no_bit(monkeypatch, calls):
    mechanism = made(num_kv_heads=2)
    alone, state = in_steps(mechanism, tokens(mechanism, 20))
    monkeypatch.setattr(one_token, "SUMS_WORTH_A_THREAD", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared, other = in_steps(mechanism, tokens(mechanism, 20))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(alone, shared, strict=True))
    assert all(torch.equal(x, tensors_of(other)[name]) for name, x in tensors_of(state).items())
    assert len(calls) == 2 * 19


def test_rows_of_a_pool_move_on_where_they_lie(calls):
    mechanism = made(num_kv_heads=2)
    given = tokens(mechanism, 20, rows=2)
    expected, own = in_steps(mechanism, given, before=9)
    # A pool of four rows that has seen other tokens; the two rows stand at 3 and 1 of it.
    _, pool = in_steps(mechanism, tokens(mechanism, 9, rows=4), before=9)
    _, begun = in_steps(mechanism, part(given, 0, 9), before=9)
    rows, untouched = torch.tensor([3, 1]), torch.tensor([0, 2])
    before = {name: x[untouched].clone() for name, x in tensors_of(pool).items() if name != "far position"}
    for name, x in tensors_of(begun).items():
        tensors_of(pool)[name][rows] = x
    recent = RecentTokens.rows_of(pool.recent, rows, begun.position.clone())
    state = WindowState(recent, ops.StateRows(pool.far, rows, begun.position.clone()))
    found = []
    for place in range(9, 20):
        output, state = mechanism.extend(**part(given, place, place + 1), state=state)
        found.append(output)
    assert len(calls) == 2 * 11
    assert all(torch.equal(one, other) for one, other in zip(found, expected[1:], strict=True))
    for name, x in tensors_of(own).items():
        if "position" not in name:
            assert torch.equal(tensors_of(pool)[name][rows], x), name
            assert torch.equal(tensors_of(pool)[name][untouched], before[name]), name
    assert state.position.tolist() == state.far.position.tolist() == [20, 20]


@pytest.mark.parametrize("window", ["wide", "in half"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_and_windows_of_half_the_size(dtype, window, calls):
    """What stands in the state is rounded once a token, and everything is computed in float32."""
    mechanism = made()
    mechanism.keep_sums_in(dtype)
    given = tokens(mechanism, 20)
    start = {"dtype": dtype} if window == "in half" else {}
    found, state = in_steps(mechanism, given, before=12, state=mechanism.init_state(3, **start))
    assert len(calls) == 8
    held = tensors_of(state)
    assert held["far sums"].dtype == dtype
    assert held["key"].dtype == held["value"].dtype == (dtype if window == "in half" else torch.float32)
    # Rounded by half a place each; a value is written after it was rounded, and answers are of rounded sums.
    exact = copy.deepcopy(mechanism).double()
    exact.keep_sums_in(None)
    expected, wide = in_steps(exact, tokens(exact, 20, torch.float64), before=12)
    rounding = torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * rounding, atol=4 * rounding)
    for name, tensor in tensors_of(wide).items():
        if name != "far normalizer":
            torch.testing.assert_close(held[name].to(tensor.dtype), tensor, rtol=4 * rounding, atol=4 * rounding)


def test_what_it_cannot_take_goes_the_plain_way(calls):
    mechanism = made()
    given = tokens(mechanism, 6)
    masked = mechanism.init_state(3)
    for place in range(6):
        mask = torch.tensor([[True], [place > 2], [True]])
        _, masked = mechanism.extend(**part(given, place, place + 1), state=masked, key_mask=mask)
    assert masked.position.tolist() == [6, 3, 6]
    in_steps(mechanism.double(), tokens(mechanism, 6, torch.float64))
    in_steps(mechanism.bfloat16(), tokens(mechanism, 6, torch.bfloat16))
    assert not calls
    with pytest.raises(ValueError, match="the logit around far_bias needs hidden"):
        in_steps(made(), {**given, "hidden": given["hidden"][..., 1:]})


def test_keys_and_values_of_two_dtypes_are_not_taken():
    """Nothing makes a ring so by itself; the program would read values as numbers of the keys' kind."""
    mechanism = made()
    given = tokens(mechanism, 1)
    _, state = in_steps(mechanism, given)
    assert state.recent.held is not None
    key, value, real = state.recent.held
    token = one_token.Token(given["query"], given["key"], given["value"], *given["unrotated"], given["hidden"])
    weights = one_token.Weights(*[torch.zeros(4)] * 7)
    for kept, taken in ((value, True), (value.half(), False)):
        ring = one_token.Ring(key, kept, real, state.position, None)
        assert one_token.takes(token, weights, ring, state.far) is taken


def test_a_state_that_does_not_fit_is_refused_and_stays_as_it_was():
    mechanism = made()
    given = tokens(mechanism, 9)
    _, state = in_steps(mechanism, given)
    before = {name: x.clone() for name, x in tensors_of(state).items()}
    one = part(given, 0, 1)
    with pytest.raises(ValueError, match="value width"):
        mechanism.extend(**{**one, "value": one["value"][..., 1:]}, state=state)
    with pytest.raises(ValueError, match="batch size"):
        mechanism.extend(**part(tokens(mechanism, 9, rows=2), 0, 1), state=state)
    assert all(torch.equal(x, before[name]) for name, x in tensors_of(state).items())


MUTANTS = {
    "no epsilon under the root": ("static_cast<float>(width) + kEpsilon)", "static_cast<float>(width) + 1e-2f)"),
    "sketches of another head": ("call_.sketches + head_ * width", "call_.sketches + 0 * width"),
    "sketches of any length": ("half[i] /= std::max(length, kShortest)", "half[i] /= 1.0f"),
    "queries without their scale": ("std::exp(call_.log_scale[head_])", "1.0f"),
    "keys without a norm": ("new_key_[i] = given[i] * by", "new_key_[i] = given[i]"),
    "the token itself is written into the sums": (
        "convert(value, leaving_ + 0, call_.value_width);",
        "convert(call_.value.at(batch_, head_, 0), leaving_ + 0, call_.value_width);",
    ),
    "confidence forgotten": ("call_.confidence_scale[head_] * confidence + own", "own"),
    "the logit from the layer's input forgotten": ("* confidence + own", "* confidence"),
    "the strength of another head": (
        "strength.of(hidden, call_.hidden_size, head_)",
        "strength.of(hidden, call_.hidden_size, 0)",
    ),
    "a copy of the first slot alone": ("convert(slot_of(ring, slot), copy", "convert(slot_of(ring, 0), copy"),
    "a prefix that was removed": ("confidence == 0.0f || call_.removed", "confidence == 0.0f"),
    "an empty state has an answer": ("confidence == 0.0f || call_.removed", "call_.removed"),
    "the slot stays unreal": ("slot_, uint8_t{1}", "slot_, uint8_t{0}"),
    "the first slot alone": ("call.position[batch_] % call.window", "0 * call.window"),
    "rows of the pool confused": ("call_.sums_rows ? call_.sums_rows[batch_] : batch_", "batch_"),
    "the ring's rows confused": ("call.ring_rows ? call.ring_rows[batch_] : batch_", "batch_"),
    "half numbers taken for bytes": ("kNumberSizes[] = {4, 2, 2}", "kNumberSizes[] = {4, 1, 1}"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    broken = with_mutant(*MUTANTS[name], tmp_path)
    monkeypatch.setattr(one_token, "library", lambda: broken)

    def all_checks():
        for options in CASES.values():
            assert_exact(options)
        assert_exact({}, removed=True)
        test_rows_of_a_pool_move_on_where_they_lie([0] * 22)
        for window in ("wide", "in half"):
            test_sums_and_windows_of_half_the_size(torch.float16, window, [0] * 8)

    with pytest.raises(AssertionError):
        all_checks()


def with_mutant(old: str, new: str, folder: Path) -> ctypes.CDLL:
    """The program and the two that it calls, with one place changed."""
    (folder / "source").mkdir()
    names = ("polysketch_one.cpp", "linear_attention_extend.cpp", "window_attention_one.cpp")
    for path in (*SOURCE.glob("*.h"), *(SOURCE / name for name in names)):
        shutil.copy(path, folder / "source")
    file = folder / "source" / names[0]
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return ctypes.CDLL(str(build.compiled(folder / "source", folder)))
