"""Is a result right? Asked before anything is timed: the speed of a wrong answer says nothing."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.workbench import Workbench

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error of an output, by dtype. Measured: 5e-7 and 5e-3; a wrong algorithm is off by far more."""

_GRADIENTS = 10  # those of weights are sums over all tokens that cancel: so many times the error is allowed
_OUTPUT = "output"
_CHECKED_HEADS = 4


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in float64, where `expected` is; infinite where anything is not finite."""
    expected = expected.detach().double()
    found = found.detach().to(expected.device, torch.float64)
    if found.shape != expected.shape:
        return math.inf
    scale = max(float(expected.norm()), 1e-12 * max(1, expected.numel()) ** 0.5)
    error = float((found - expected).norm()) / scale
    return error if math.isfinite(error) else math.inf


def disagreement(call: Call, *, backward: bool) -> dict[str, float]:
    """Relative errors of a call against its definition: of the output and, with `backward`, of every gradient.

    Raises:
        ValueError: the call has no definition.
    """
    if call.definition is None:
        raise ValueError("expected a call with a definition to compare with, found one without")
    expected = _results(call.definition(), backward=backward)
    found = _results(call, backward=backward)
    return {name: relative_error(found[name], tensor) for name, tensor in expected.items()}


def checked_shape(local: int, heads: int, head_dim: int, batch: int = 1, *, causal: bool = True) -> Shape:
    """Where attention is checked: a few heads, and two and a half chunks of `local`, so that every part has weight."""
    return Shape(batch, 2 * local + local // 2 + 1, min(heads, _CHECKED_HEADS), head_dim, causal)


def require_agreement(
    bench: Workbench,
    make: Callable[[], Call],
    what: str,
    *,
    backward: bool,
    reference: str = "the float64 reference",
) -> None:
    """Refuse a computation that is wrong, and say how far off one is that is right.

    Args:
        bench: the tolerance is that of `TOLERANCES` for its dtype, and for gradients ten times as much.
        make: gives the call; seeded here, so that a refusal can be repeated.
        what: names it in messages.
        backward: gradients too.
        reference: what the definition is called in messages.

    Raises:
        ValueError: naming the measured error and the tolerance; or a dtype that has none.
    """
    if bench.dtype not in TOLERANCES:
        raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16 to be timed, found {bench.dtype}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        errors = disagreement(make(), backward=backward)
    for name, error in errors.items():
        tolerance = TOLERANCES[bench.dtype] * (1 if name == _OUTPUT else _GRADIENTS)
        if not error <= tolerance:
            raise ValueError(
                f"{what} is wrong and is not timed: its {name} is off by {error:.2g} of its size from {reference},"
                f" expected at most {tolerance:g}"
            )
    bench.progress(f"{what} agrees with {reference}: relative error {errors[_OUTPUT]:.1e}")


def _results(call: Call, *, backward: bool) -> dict[str, Tensor]:
    """The output and the gradients, under a cotangent drawn in float64: the same for every dtype."""
    for leaf in call.leaves:
        leaf.requires_grad_(backward)
    output = call.function()
    if not backward:
        return {_OUTPUT: output}
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device, output.dtype)
    gradients = torch.autograd.grad(output, call.leaves, cotangent)
    return {_OUTPUT: output.detach()} | {
        f"gradient of input {index + 1}": gradient for index, gradient in enumerate(gradients)
    }
