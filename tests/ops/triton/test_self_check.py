"""Programs are compared with plain PyTorch at their first call by "auto"; a broken one is named, and not taken."""

import json
import warnings
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.errors import OutOfResources

from polysketch import ops
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.cross_entropy import cross_entropy_
from polysketch.ops.delta import self_check as delta_check
from polysketch.ops.gated_gelu import gated_gelu
from polysketch.ops.head_sketch import head_sketch
from polysketch.ops.learned_sketch import learned_sketch
from polysketch.ops.linear import decode
from polysketch.ops.linear import self_check as linear_check
from polysketch.ops.linear.triton import decoding
from polysketch.ops.linear.types import Diagonal, Inputs, Plan
from polysketch.ops.low_rank_sketch import low_rank_sketch
from polysketch.ops.rotated_heads import rotated_heads
from polysketch.ops.triton import availability, self_check
from polysketch.ops.triton.launch import launching
from polysketch.ops.window import self_check as window_check

PROGRAM = {
    "linear": "linear_outputs",
    "sketch": "learned_sketch",
    "low rank": "low_rank_sketch",
    "head sketch": "head_sketch",
    "convolution": "causal_convolution",
    "rotated heads": "rotated_heads",
    "gated gelu": "gated_gelu",
    "cross-entropy": "cross_entropy",
    "polynomial": "polynomial_forward",
    "window": "window_forward",
    "delta": "delta_errors",
}
OPS = tuple(PROGRAM)
GRADIENT = {
    "sketch": "learned_sketch_inputs_backward",
    "low rank": "low_rank_sketch_factors_backward",
    "head sketch": "head_sketch_backward",
    "convolution": "causal_convolution_backward",
    "rotated heads": "rotated_heads_backward",
    "gated gelu": "gated_gelu_backward",
    "polynomial": "polynomial_grad_query",
    "window": "window_grad_query",
}
PLAIN = {
    "linear": "chunked",
    "sketch": "chunked",
    "low rank": "reference",
    "head sketch": "reference",
    "convolution": "reference",
    "rotated heads": "reference",
    "gated gelu": "reference",
    "cross-entropy": "reference",
    "polynomial": "blockwise",
    "window": "blockwise",
    "delta": "chunked",
}


SMALLER = (
    *((window_check, name, size) for name, size in (("_LENGTH", 100), ("_WINDOW", 50), ("_BLOCK", 30))),
    *((module, "_LENGTH", 70) for module in (linear_check, delta_check)),  # beyond a chunk
)
"""Checks that the interpreter does in less time."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and a CPU that "auto" takes for a device of the programs; unwritten memory is NaN."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_answers", {})
    for module, name, size in SMALLER:
        monkeypatch.setattr(module, name, size)
    availability.AUTO_DEVICES.add("cpu")
    torch.use_deterministic_algorithms(True)
    yield tmp_path
    torch.use_deterministic_algorithms(False)
    availability.AUTO_DEVICES.discard("cpu")


def tensors(op: str) -> list[Tensor]:
    torch.manual_seed(0)
    if op == "sketch":
        networks = LearnedSketch(8, sketch_size=4).networks
        return [torch.randn(1, 1, 20, 8), *(w.detach() for one in networks for w in one.weights())]
    if op == "low rank":
        return [torch.randn(1, 2, 20, 6), torch.randn(2, 1, 2, 6, 5)]
    if op == "head sketch":
        return [torch.randn(1, 2, 20, 6), torch.randn(6), torch.randn(6), torch.randn(2, 2, 6, 5)]
    if op == "convolution":
        return [torch.randn(1, 2, 20, 6), torch.randn(1, 6, 3)]
    if op == "rotated heads":
        return [torch.randn(1, 5, 70, 6), torch.randn(30)]
    if op == "gated gelu":
        return [torch.randn(20, 12)]
    if op == "cross-entropy":
        return [torch.randn(20, 12), torch.randn(12)]
    if op == "delta":
        return [
            torch.nn.functional.normalize(torch.randn(1, 1, 20, 3), dim=-1),
            torch.randn(1, 1, 20, 2),
            torch.rand(1, 1, 20),
        ]
    return [torch.randn(1, 1, 40, width) for width in (6, 6, 3)]


def call(op: str, given: list[Tensor], backend: str = "auto") -> Tensor:
    if op == "linear":
        return ops.linear_attention(*given, power=2, causal=True, offset=1.0, compute_chunk=16, backend=backend).output
    if op == "sketch":
        return learned_sketch(given[0], given[1:], 2, backend=backend)
    if op == "low rank":
        return low_rank_sketch(*given, backend=backend)
    if op == "head sketch":
        return torch.cat(head_sketch(*given, backend=backend), -1)
    if op == "convolution":
        return ops.causal_convolution(*given, backend=backend)[0]
    if op == "rotated heads":
        turn = torch.linspace(0, 1, 70 * 3).view(70, 3)
        return torch.cat(rotated_heads(*given, turn.cos(), turn.sin(), keep_normed=True, backend=backend), -1)
    if op == "gated gelu":
        return gated_gelu(*given, backend=backend)
    if op == "cross-entropy":
        logits, bias = given
        targets = torch.arange(20) % 12
        found = cross_entropy_(logits.clone(), bias, targets, torch.tensor(20.0), torch.float32, backend=backend)
        return torch.cat([each.flatten() for each in found])
    if op == "delta":
        return ops.delta_writes(*given, backend=backend)
    if op == "window":
        return ops.sliding_window_attention(*given, window=9, causal=True, backend=backend)
    return ops.polynomial_attention(*given, degree=2, causal=True, backend=backend)


def breaking(name: str):
    """Within this, what the last instance of a program would write stays as it is."""

    def launch(kernel, programs, arguments, options):
        count = programs - 1 if kernel.__name__ == name else programs
        if count:
            kernel[(count,)](*arguments, **options)

    return launching(launch)


def kept() -> dict:
    return next(iter(json.loads(self_check._file().read_text()).values()))


@pytest.fixture
def asked(monkeypatch):
    """Calls that were tried, in order."""
    found, intact = [], self_check._apart
    monkeypatch.setattr(self_check, "_apart", lambda attempt: (found.append(1), intact(attempt))[1])
    return found


@pytest.mark.parametrize("op", OPS)
@torch.no_grad()
def test_programs_that_agree_are_taken_and_asked_once(op, asked):
    given = tensors(op)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = [call(op, given) for _ in range(2)]
    assert all(torch.equal(one, call(op, given, "triton")) for one in found)
    assert len(asked) == 1
    assert max(max(errors.values()) for errors in kept().values()) < 0.1
    self_check._answers.clear()  # another process
    assert torch.equal(call(op, given), found[0])
    assert len(asked) == 1


@pytest.mark.parametrize("op", OPS)
@torch.no_grad()
def test_a_broken_program_is_named_with_its_figures_and_not_taken_again(op, asked):
    given, expected = tensors(op), call(op, tensors(op), PLAIN[op])
    with breaking(PROGRAM[op]), pytest.warns(UserWarning, match=r"disagree with plain PyTorch.*output.*not finite"):
        found = call(op, given)
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(call(op, given), expected)
    assert len(asked) == 1
    assert torch.equal(call(op, given, "triton"), call(op, given, "triton"))  # asked for by name: taken, unchecked
    self_check._answers.clear()
    with pytest.warns(UserWarning, match="disagree"):
        assert torch.equal(call(op, given), expected)
    assert len(asked) == 1


@pytest.mark.parametrize("op", GRADIENT)
def test_a_broken_gradient_is_found_where_gradients_are_wanted(op):
    given = [tensor.requires_grad_() for tensor in tensors(op)]
    with breaking(GRADIENT[op]):
        with torch.no_grad():
            assert torch.equal(call(op, given), call(op, given, "triton"))
        with pytest.warns(UserWarning, match="gradient of"):
            found = torch.autograd.grad(call(op, given).sum(), given)
    expected = torch.autograd.grad(call(op, given, PLAIN[op]).sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_delta_rule_asks_for_the_programs_of_its_gradients_too_and_a_broken_one_is_not_taken(asked):
    """Forward, for a backward pass asks nothing: its sums are linear attention's."""
    given = [tensor.requires_grad_() for tensor in tensors("delta")]
    with breaking("linear_fold"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        output = call("delta", given)
    assert ["linear_attention float32" in str(one.message) for one in said if one.category is UserWarning] == [True]
    found = torch.autograd.grad(output.sum(), given)
    expected = torch.autograd.grad(call("delta", given, "chunked").sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("error", "kept_for_others"),
    [(OutOfResources(2, 1, "shared memory"), True), (RuntimeError("no C compiler; out of resource"), False)],
)
def test_a_program_that_raises_is_not_taken_and_other_processes_learn_of_it_from_triton_alone(error, kept_for_others):
    def refuse(*_):
        raise error

    given = tensors("polynomial")
    expected = call("polynomial", given, "blockwise")
    with launching(refuse), pytest.warns(UserWarning, match="out of resource"):
        assert torch.equal(call("polynomial", given), expected)
    with launching(refuse):
        assert torch.equal(call("polynomial", given), expected)
    assert self_check._file().exists() is kept_for_others


@pytest.mark.parametrize("broken", [False, True])
def test_a_backward_pass_asks_nothing_and_goes_by_what_the_forward_pass_found(broken, asked):
    """Where it runs on a device, a check of gradients would wait for the thread that waits for the check."""
    given = [tensor.requires_grad_() for tensor in tensors("polynomial")]
    with ExitStack() as stack:
        if broken:
            stack.enter_context(breaking(PROGRAM["polynomial"]))
            stack.enter_context(pytest.warns(UserWarning, match="disagree"))
        output = checkpoint(lambda *x: call("polynomial", list(x)), *given, use_reentrant=True)
    output.sum().backward()
    found = [tensor.grad for tensor in given]
    backend = PLAIN["polynomial"] if broken else "triton"
    expected = torch.autograd.grad(call("polynomial", given, backend).sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(asked) == 1


def test_what_is_known_of_a_width_says_nothing_of_another_that_begins_with_its_digits(monkeypatch):
    monkeypatch.setattr(self_check, "_answers", {("cpu", "sketch float32 size=16 products=ieee backward=True"): False})
    assert self_check.known_bad("cpu", "sketch float32 size=16")
    assert not self_check.known_bad("cpu", "sketch float32 size=1")


@torch.no_grad()
@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}'])
def test_a_file_that_somebody_spoilt_is_written_anew(text, asked):
    self_check._file().parent.mkdir(parents=True)
    self_check._file().write_text(text)
    call("polynomial", tensors("polynomial"))
    assert len(asked) == 1
    assert isinstance(json.loads(self_check._file().read_text()), dict)


@torch.no_grad()
def test_a_folder_that_cannot_be_written_to_is_no_error(folder, asked):
    (folder / "polysketch").write_text("a file where the folder should be")
    call("polynomial", tensors("polynomial"))
    assert len(asked) == 1


@torch.no_grad()
def test_other_programs_another_triton_or_device_are_asked_anew(monkeypatch, asked):
    call("polynomial", tensors("polynomial"))
    self_check._answers.clear()
    monkeypatch.setattr(self_check, "_here", lambda device: "another")
    call("polynomial", tensors("polynomial"))
    assert len(asked) == 2
    assert len(json.loads(self_check._file().read_text())) == 2


def test_nothing_that_looks_on_sees_the_check():
    """Operations that are counted, activations that are recomputed, the generator of random numbers."""
    given = [tensor.requires_grad_() for tensor in tensors("polynomial")]
    before = torch.get_rng_state()
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            call("polynomial", given)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    self_check._answers.clear()
    self_check._file().unlink()
    checkpoint(lambda *x: call("polynomial", list(x)), *given, use_reentrant=False).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("bad", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_code_asks_nothing_and_takes_no_program_known_to_be_bad(bad, asked):
    given = tensors("linear")
    if bad:
        with breaking("linear_outputs"), pytest.warns(UserWarning, match="disagree"):
            call("linear", given)
    asked.clear()
    torch.compiler.reset()
    found = torch.compile(lambda *x: call("linear", list(x)), fullgraph=True, backend="aot_eager")(*given)
    assert asked == []
    assert torch.equal(found, call("linear", given, "chunked" if bad else "triton"))


@torch.no_grad()
@pytest.mark.parametrize("broken", [False, True])
def test_decoded_tokens_are_checked_too_over_the_end_of_a_chunk(broken, asked):
    """On a CPU, whose states count positions once, only what is picked is looked at."""
    state = ops.LinearAttentionState.init(1, 1, 6, 3, power=2, local_chunk=8, local_dim=5)
    shapes = {"query": (2, 6), "key": (1, 6), "value": (1, 3), "local_query": (2, 5), "local_key": (1, 5)}
    tensors = {name: torch.randn(1, heads, 1, width) for name, (heads, width) in shapes.items()}
    inputs = Inputs(**tensors, log_decay=-torch.ones(1, 1, 1))
    plan = Plan(2, 1, True, 1.0, True, 4, 8, Diagonal.CAUSAL, True)
    pick = partial(decode._step_for, inputs, plan, state)
    if broken:
        with breaking("linear_extend"), pytest.warns(UserWarning, match="linear_attention_extend float32 features=6"):
            picked = pick()
    else:
        picked = pick()
    assert (picked is decoding.extend_one_) is not broken
    assert (decode.why_not_captured(state) is None) is not broken
    assert len(asked) == 1
