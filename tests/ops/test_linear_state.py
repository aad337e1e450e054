"""States: split anywhere, decode in place, combine, roll back, reorder, save; of one size at every position."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.linear_cases import Case, arguments, assert_same, empty_state, make, prefix_share, relative_error, run
from polysketch import ops
from polysketch.ops.linear import spans as spans_of_calls
from polysketch.ops.linear import state as states_in_files
from polysketch.ops.native import why_unavailable

CASES = [
    Case(length=70),
    Case(length=70, decays=True, padded=True),
    Case(length=70, power=1, decays=True),
    Case(length=70, local_chunk=0, decays=True),
    Case(length=70, power=1, local_chunk=0, padded=True),
    Case(length=70, power=1, factors=2, local_chunk=0, decays=True, padded=True),
    Case(length=70, power=1, factors=2, features=10),
]


def parts(state: ops.LinearAttentionState) -> dict:
    """All tensors of a state, positions as floats, so that they compare like the rest."""
    return {name: x.double() for name, x in state.tensors().items() if x.numel()}


def run_in_spans(case: Case, tensors, edges: list[int], backend: str = "chunked"):
    """Outputs and denominators side by side and the last state, of calls that hand their state on."""
    state, outputs, denominators = empty_state(case), [], []
    for start, stop in pairwise(edges):
        result = run(case, tensors.span(start, stop), backend=backend, state=state, return_state=True)
        outputs.append(result.output)
        denominators.append(result.denominator)
        state = result.state
    return torch.cat(outputs, 2), torch.cat(denominators, 2), state


@pytest.mark.parametrize("case", CASES, ids=str)
@given(splits=st.lists(st.integers(1, 69), max_size=4, unique=True).map(sorted))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_split_anywhere_same_outputs_and_same_state(case, splits):
    tensors = make(case)
    whole = run(case, tensors, backend="reference", return_state=True)
    for backend in ("chunked", "reference"):
        output, denominator, state = run_in_spans(case, tensors, [0, *splits, case.length], backend)
        assert relative_error(output, whole.output) < 1e-10
        assert relative_error(denominator, whole.denominator) < 1e-10
        assert_same(parts(state), parts(whole.state), 1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_token_at_a_time_in_place_equals_the_whole(case):
    tensors = make(case)
    whole = run(case, tensors, backend="reference", return_state=True)
    state = empty_state(case)
    addresses = {name: x.data_ptr() for name, x in state.tensors().items()}
    outputs, denominators = [], []
    first = 30  # the first span holds the padding, then rows stand at different positions
    for start, stop in zip([0, *range(first, 60), 63], [*range(first, 60), 63, 70], strict=True):
        span = tensors.span(start, stop)
        if start >= first and span.key_mask is not None:
            # Decoding has no padding: a masked token is one whose key is zero.
            real = span.key_mask[:, None, :, None]
            span = replace(span, key=span.key * real, value=span.value * real, key_mask=None)
            span.local_key = None if span.local_key is None else span.local_key * real
            span.log_decay = None if span.log_decay is None else span.log_decay * real[..., 0]
        keywords = arguments(case, span)
        result = ops.linear_attention_extend_(span.query, span.key, span.value, state, **keywords)
        outputs.append(result.output)
        denominators.append(result.denominator)
        assert result.state is state
    assert relative_error(torch.cat(outputs, 2), whole.output) < 1e-10
    assert relative_error(torch.cat(denominators, 2), whole.denominator) < 1e-10
    assert_same(parts(state), parts(whole.state), 1e-10)
    assert {name: x.data_ptr() for name, x in state.tensors().items()} == addresses


def test_the_prefix_of_these_cases_carries_weight():
    assert all(0.3 < prefix_share(case, make(case)) < 0.7 for case in CASES if case.local_chunk)


def test_padding_in_front_changes_nothing():
    case = Case(length=50, decays=True)
    tensors = make(case)

    def shifted(x):
        front = torch.full_like(x[:, :, :9], 3.0)
        return torch.cat([front, x], 2)

    padded = tensors.map(shifted)
    padded.log_decay = -padded.log_decay.abs()
    padded.key_mask = torch.arange(59).expand(case.batch, -1) >= 9
    plain, moved = run(case, tensors, return_state=True), run(case, padded, return_state=True)
    assert relative_error(moved.output[:, :, 9:], plain.output) < 1e-12
    assert float(moved.output[:, :, :9].abs().max()) == 0
    assert_same(parts(moved.state), parts(plain.state), 1e-12)


@pytest.mark.parametrize("local_chunk", [0, 16])
def test_later_tokens_change_nothing_before_them(local_chunk):
    case = Case(length=60, local_chunk=local_chunk, decays=True)
    tensors = make(case)
    before = run(case, tensors).output[:, :, :41]
    changed = tensors.map(lambda x: torch.cat([x[:, :, :41], x[:, :, 41:] * 2], 2))
    assert torch.equal(run(case, changed).output[:, :, :41], before)
    assert not torch.equal(run(case, changed).output[:, :, 41:], run(case, tensors).output[:, :, 41:])


def test_rows_of_a_batch_do_not_influence_one_another():
    case = Case(length=60, decays=True, padded=True, batch=3)
    tensors = make(case)
    alone = tensors.map(lambda x: x[1:2])
    assert relative_error(run(case, alone).output, run(case, tensors).output[1:2]) < 1e-13


@pytest.mark.parametrize("options", [{"local_chunk": 0}, {"local_chunk": 16}, {"power": 1, "factors": 2}], ids=str)
def test_combine_is_associative_and_gives_the_joint_state(options):
    case = Case(length=90, decays=True, **options)
    tensors = make(case)
    first, second, third = (
        run(case, tensors.span(*span), return_state=True).state for span in ((0, 32), (32, 64), (64, 90))
    )
    whole = run(case, tensors, return_state=True).state
    left = ops.combine(ops.combine(first, second), third)
    assert_same(parts(left), parts(whole), 1e-12)
    assert_same(parts(ops.combine(first, ops.combine(second, third))), parts(whole), 1e-12)


def test_combine_refuses_an_earlier_span_that_ends_inside_a_chunk():
    case = Case(length=20)
    state = run(case, make(case), return_state=True).state
    with pytest.raises(ValueError, match="chunk boundary"):
        ops.combine(state, state)


@pytest.mark.parametrize("options", [{}, {"power": 1, "factors": 2}], ids=str)
def test_reorder_gives_the_states_of_the_named_rows(options):
    case = Case(length=37, batch=3, decays=True, **options)
    tensors = make(case)
    state = run(case, tensors, return_state=True).state.reorder(torch.tensor([2, 0, 2]))
    named = tensors.map(lambda x: x[[2, 0, 2]])
    assert_same(parts(state), parts(run(case, named, return_state=True).state), 1e-12)


def test_clone_is_untouched_by_what_follows():
    case = Case(length=20, local_chunk=16)
    state = run(case, make(case), return_state=True).state
    kept, before = state.clone(), parts(state.clone())
    one = make(case, 1)
    ops.linear_attention_extend_(one.query, one.key, one.value, state, **arguments(case, one))
    assert_same(parts(kept), before, 0.0)
    assert state.position.tolist() == [21, 21]


def test_size_depends_on_features_and_chunk_never_on_the_context():
    case = Case(length=16)
    sizes = {run(case, make(case, n), return_state=True).state.nbytes for n in (1, 16, 100)}
    assert sizes == {empty_state(case).nbytes}


BACKENDS = ["reference", "chunked", *([] if why_unavailable() else ["native"])]


def held(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor keeps alive."""
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spans", [1, 3])
@pytest.mark.parametrize("case", [*CASES, Case(length=70, local_chunk=0), Case(length=64)], ids=str)
def test_a_state_keeps_no_more_alive_than_itself(case, spans, backend, monkeypatch):
    """Views of a sequence, even those without an entry, would keep all of it."""
    monkeypatch.setattr(spans_of_calls, "num_spans", lambda *_: spans)
    case = replace(case, dtype=torch.float32)
    tensors = make(case)
    state = run(case, tensors, backend=backend, return_state=True).state
    later = run(case, tensors, backend=backend, state=state, return_state=True).state
    for found in (state, later, later.clone(), ops.combine(empty_state(case), state)):
        assert {name: held(x) for name, x in found.tensors().items()} == {
            name: x.numel() * x.element_size() for name, x in found.tensors().items()
        }


@pytest.mark.parametrize("local_chunk", [0, 16])
def test_what_combine_gives_is_nobody_elses_memory(local_chunk):
    case = Case(length=20, local_chunk=local_chunk, decays=True)
    tensors = make(case)
    earlier = run(case, make(case, 32), return_state=True).state
    later = run(case, tensors, return_state=True).state
    before = [parts(earlier.clone()), parts(later.clone())]
    joint = ops.combine(earlier, later)
    one = make(case, 1)
    ops.linear_attention_extend_(one.query, one.key, one.value, joint, **arguments(case, one))
    joint.reset_()
    assert_same(parts(earlier), before[0], 0.0)
    assert_same(parts(later), before[1], 0.0)


@pytest.mark.parametrize("case", [Case(length=37, decays=True), Case(length=37, power=1, factors=2)], ids=str)
def test_a_saved_state_is_the_same_when_loaded(case, tmp_path):
    state = run(case, make(case), return_state=True).state
    state.save(tmp_path / "state.safetensors")
    loaded = ops.LinearAttentionState.load(tmp_path / "state.safetensors")
    assert_same(parts(loaded), parts(state), 0.0)
    assert (loaded.power, loaded.factors) == (state.power, state.factors) == (case.power, case.factors)


def test_states_are_float32_for_narrow_inputs():
    case = Case(length=37, dtype=torch.bfloat16)
    state = run(case, make(case), return_state=True).state
    assert state.sums.dtype == state.open_key.dtype == torch.float32


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("case", [*CASES, Case(length=70, value_dim=64, features=32, head_dim=64, degree=2)], ids=str)
def test_a_native_step_equals_a_step_in_plain_pytorch(case):
    """The same tokens, in float32 through the program and in float64 without it."""
    tensors = make(replace(case, padded=False))
    found, expected = (
        [*steps(case, tensors.map(lambda x: x.to(dtype)), empty_state(replace(case, dtype=dtype)))]  # noqa: B023
        for dtype in (torch.float32, torch.float64)
    )
    for (a, state), (b, wanted) in zip(found, expected, strict=True):
        assert relative_error(a.output, b.output) < 2e-5
        assert relative_error(a.denominator, b.denominator) < 2e-5
        assert_same(parts(state), parts(wanted), 2e-5)


def steps(case: Case, tensors, state):
    """Results and states after one, two, three, ... tokens, from a state whose rows stand at different positions."""
    first = tensors.span(0, 7)
    first.key_mask = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
    state.copy_(run(case, first, backend="reference", state=state, return_state=True).state)
    for start in range(7, case.length):
        span = tensors.span(start, start + 1)
        result = ops.linear_attention_extend_(span.query, span.key, span.value, state, **arguments(case, span))
        yield result, state.clone()


OTHERS = {
    "features": {"feature_dim": 16},
    "factors": {"feature_dim": 16, "factors": 2},
    "rows": {"batch_size": 2},
    "heads": {"heads": 2},
    "values": {"value_dim": 5},
    "dtype": {"dtype": torch.float64},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_states_of_other_sizes_are_not_combined(other):
    sizes = {"batch_size": 1, "heads": 1, "feature_dim": 8, "value_dim": 3, "dtype": torch.float32}
    states = []
    for each in (sizes, sizes | other):
        shape = [each[name] for name in ("batch_size", "heads", "feature_dim", "value_dim")]
        options = {name: value for name, value in each.items() if name in ("dtype", "factors")}
        states.append(ops.LinearAttentionState.init(*shape, **options))
    with pytest.raises(ValueError, match="same power, factors, feature_dim, shape of sums and dtype"):
        ops.combine(*states)


SPOILT = {
    "sums too short": lambda t, o: t.update(sums=t["sums"][:, :, :3]),
    "values too narrow": lambda t, o: t.update(open_value=t["open_value"][..., :1]),
    "an open chunk too short": lambda t, o: t.update(open_features=t["open_features"][:, :, :2]),
    "decay of another chunk": lambda t, o: t.update(open_log_decay=t["open_log_decay"][:, :, :2]),
    "other power": lambda t, o: o.update(power="1"),
    "no power at all": lambda t, o: o.update(power="seven"),
    "half precision": lambda t, o: t.update(normalizer=t["normalizer"].half()),
    "sums of bytes": lambda t, o: t.update(sums=t["sums"].to(torch.int8)),
    "positions before the first token": lambda t, o: t.update(position=t["position"] - 100),
    "positions beyond counting": lambda t, o: t.update(position=t["position"] + 2**60),
    "positions of other rows": lambda t, o: t.update(position=t["position"].repeat(2)),
    "a tensor less": lambda t, o: t.pop("normalizer"),
    "a tensor more": lambda t, o: t.update(more=t["sums"].clone()),
}


def written_state(tmp_path):
    """A file of a state in the middle of a chunk, its tensors, and its options."""
    state = run(Case(length=37), make(Case(length=37)), return_state=True).state
    state.save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors", state.tensors(), {"power": str(state.power), "factors": str(state.factors)}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_file_whose_sizes_or_positions_fit_no_program_is_refused(spoil, tmp_path):
    """Even with a digest of its own: programs in C++ write as far as the sizes say."""
    path, tensors, options = written_state(tmp_path)
    spoil(tensors, options)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(
        tensors, path, metadata={**options, "sha256": states_in_files.state_sha256(tensors, options)}
    )
    with pytest.raises(ValueError, match=re.escape(f"{path}: expected") + "|does not fit itself"):
        ops.LinearAttentionState.load(path)


def test_one_changed_byte_anywhere_in_a_file_is_found_or_changes_nothing(tmp_path):
    path, tensors, _ = written_state(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 400)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            found = ops.LinearAttentionState.load(path).tensors()
        except ValueError:
            continue
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_state_made_by_hand_whose_sizes_do_not_fit_is_refused_by_the_operation():
    case = Case(length=8)
    state = empty_state(case)
    state.open_value = state.open_value[..., :1].contiguous()
    with pytest.raises(ValueError, match="does not fit itself: expected open_value"):
        run(case, make(case), state=state)
