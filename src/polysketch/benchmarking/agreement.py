"""Is a result right? Asked before anything is timed: the speed of a wrong answer says nothing."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.benchmarking.calls import Call

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error of an output, by dtype. Measured: 5e-7 and 5e-3; a wrong algorithm is off by far more."""

_GRADIENTS = 10  # those of weights are sums over all tokens that cancel: so many times the error is allowed
_OUTPUT = "output"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in float64 on the CPU; infinite where anything is not finite."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
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


def require_agreement(make: Callable[[], Call], what: str, *, dtype: torch.dtype, backward: bool) -> float:
    """Refuse a computation that is wrong.

    Args:
        make: gives the call; seeded here, so that a refusal can be repeated.
        what: names it in the message.
        dtype: of the call; the tolerance is that of `TOLERANCES`, and for gradients ten times as much.
        backward: gradients too.

    Returns:
        The relative error of the output.

    Raises:
        ValueError: naming the measured error and the tolerance.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        errors = disagreement(make(), backward=backward)
    for name, error in errors.items():
        tolerance = TOLERANCES[dtype] * (1 if name == _OUTPUT else _GRADIENTS)
        if not error <= tolerance:
            raise ValueError(
                f"{what} is wrong and is not timed: its {name} is off by {error:.2g} of its size from the float64"
                f" reference, expected at most {tolerance:g}"
            )
    return errors[_OUTPUT]


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
