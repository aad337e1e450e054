"""Every map and mechanism on a device, whole, decoding and compiled, against copies in float64 on the CPU."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from attention.cases import CASES, LENGTH, Case
from device.yardstick import DTYPES, Device, Named, assert_within, moved, rounded, with_gradients
from polysketch.feature_maps import GaussianSketch, LearnedSketch

# Networks and norms round at every layer in the working dtype, and the degree multiplies relative errors by four.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
CANCELLATION = 3  # gradients of parameters are sums over all tokens that cancel: so many times the error is allowed
HEADS, WIDTH = 4, 64

SKETCHES = {
    "learned": LearnedSketch(WIDTH),
    "learned, degree 8": LearnedSketch(WIDTH, degree=8),
    "learned, per head": LearnedSketch(WIDTH, share="head", num_kv_heads=HEADS),
    "random": GaussianSketch(WIDTH),
}


def module_and_copy(module: nn.Module, inputs: Named, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Named]:
    """The module rounded to a dtype, its copy in float64, and inputs that the dtype holds."""
    rough = copy.deepcopy(module).to(dtype)
    return rough, copy.deepcopy(rough).double(), rounded(inputs, dtype)


def assert_agrees(module: nn.Module, inputs: Named, dtype: torch.dtype, device: Device, call, record=None) -> None:
    """Output and gradients of inputs and parameters."""
    rough, exact, inputs = module_and_copy(module, inputs, dtype)
    found = run(rough.to(device.where), moved(inputs, device.where, dtype), call)
    expected = run(exact, inputs, call)
    summed = {f"gradient of {name}" for name, _ in module.named_parameters()}
    tolerance = TOLERANCES[dtype]
    assert_within(found, {name: x for name, x in expected.items() if name not in summed}, tolerance, record)
    parameters = {name: x for name, x in expected.items() if name in summed}
    if parameters:
        assert_within(found, parameters, CANCELLATION * tolerance)


def run(module: nn.Module, inputs: Named, call) -> Named:
    """Output and every gradient."""
    return with_gradients(lambda **given: {"output": call(module, **given)}, inputs, dict(module.named_parameters()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SKETCHES)
def test_sketches_are_those_of_float64(name, dtype, computer, record_property):
    torch.manual_seed(0)
    # More rows than one piece of the networks' loop where sizes are real: pieces are larger on a GPU.
    length = 50 if computer.small else 9_000 if (name, dtype) == ("learned", torch.float32) else 600
    inputs = {"x": torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64)}
    assert_agrees(SKETCHES[name], inputs, dtype, computer, lambda one, x: one.map_keys(x), record_property)


def made(case: Case, device: Device) -> tuple[nn.Module, Named]:
    """A mechanism and its inputs, with heads of 64 and 300 tokens where sizes are real."""
    width = {} if device.small else {"head_dim": min(WIDTH, case.widest_head or WIDTH)}
    module = case.build(**width)
    tensors = case.inputs(length=LENGTH if device.small else 300, **width)
    return module, dict(zip(("query", "key", "value", "hidden"), tensors, strict=True))


def attend(module: nn.Module, **given: Tensor) -> Tensor:
    """All tokens at once."""
    return module(**given, causal=module.is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mechanisms_are_those_of_float64(case, dtype, computer, record_property):
    if case.leaves_out and dtype != torch.float32:
        pytest.skip("rounding changes the hashes, and with them which tokens are seen")
    assert_agrees(*made(case, computer), dtype, computer, attend, record_property)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.leaves_out], ids=str)
def test_decoding_over_the_ends_of_chunks_gives_what_float64_gives_at_once(case, dtype, computer, record_property):
    module, inputs = made(case, computer)
    if not module.is_causal:
        pytest.skip("is never causal")
    rough, exact, inputs = module_and_copy(module, inputs, dtype)
    length = inputs["query"].shape[2]
    found = decode(rough.to(computer.where), moved(inputs, computer.where, dtype), [13, 1, 1, 1, 1, 1, length - 18])
    expected = decode(exact, inputs, [length])
    assert_within({"output": found}, {"output": expected}, TOLERANCES[dtype], record_property)


def decode(module: nn.Module, inputs: Named, spans: list[int]) -> Tensor:
    """Outputs of consecutive spans."""
    state, outputs, start = module.init_state(2), [], 0
    for span in spans:
        hidden = inputs["hidden"].narrow(1, start, span)
        query, key, value = (inputs[part].narrow(2, start, span) for part in ("query", "key", "value"))
        output, state = module.extend(query, key, value, state, hidden=hidden)
        outputs.append(output)
        start += span
    return torch.cat(outputs, 2)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_a_mechanism_is_one_compiled_graph(computer):
    """On a CPU the compiler's own back end is left out, for it needs a C++ compiler."""
    case = next(case for case in CASES if case.name == "polysketch-paper" and case.options.get("prefix_gain"))
    compiled = partial(torch.compile, fullgraph=True, backend="inductor" if computer.name == "cuda" else "aot_eager")
    call = lambda one, **given: compiled(one)(**given, causal=True)  # noqa: E731
    assert_agrees(*made(case, computer), torch.float32, computer, call)
