"""What a check is, and comparing tensors of a device with float64 ones of the CPU."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polysketch.benchmarking.agreement import relative_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_POISON_SIZES = [2**exponent for exponent in range(8, 25)]


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared.
        errors: device -> relative error of every tensor compared, |found - expected| / |expected|.
        tolerance: largest error that passes.
        only_on: type of the devices that it is for; None for all.
    """

    name: str
    errors: Callable[[torch.device], dict[str, float]]
    tolerance: float
    only_on: str | None = None


def run_check(check: Check, device: torch.device) -> dict[str, Any]:
    """Its record: passed or not, the worst error, or the exception."""
    try:
        poison(device)
        errors = check.errors(device)
    except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {"name": check.name, "passed": False, "error": text}
    worst = max(errors, key=lambda name: errors[name])
    passed = errors[worst] <= check.tolerance
    record = {"name": check.name, "passed": passed, "worst": worst, "tolerance": check.tolerance}
    # JSON has no infinity.
    return {**record, "relative_error": errors[worst] if math.isfinite(errors[worst]) else "not finite"}


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next allocations get, so that nothing passes by reading or leaving it as is."""
    if device.type == "cpu":
        return  # its allocator gives large blocks back to the system, which clears them
    blocks = [torch.full((size,), torch.nan, device=device) for size in _POISON_SIZES for _ in range(2)]
    del blocks


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of every tensor expected; anything not finite is an infinite error."""
    return {name: relative_error(found[name], tensor) for name, tensor in expected.items()}


def with_gradients(
    function: Callable[..., Mapping[str, Tensor]], leaves: Mapping[str, Tensor], parameters: Mapping[str, Tensor] = {}
) -> dict[str, Tensor]:
    """What `function` makes of the leaves, and gradients of leaves and parameters under fixed random cotangents.

    The cotangents are drawn in float64 on the CPU: the same for every device and dtype.
    """
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    outputs = dict(function(**leaves))
    differentiable = {name: output for name, output in outputs.items() if output.requires_grad}
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(tuple(x.shape), generator=generator, dtype=torch.float64) for x in differentiable.values()
    ]
    cotangents = [c.to(x.device, x.dtype) for c, x in zip(cotangents, differentiable.values(), strict=True)]
    wanted = {**leaves, **parameters}
    gradients = torch.autograd.grad(
        list(differentiable.values()), list(wanted.values()), cotangents, allow_unused=True, materialize_grads=True
    )
    named = {f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return {name: output.detach() for name, output in outputs.items()} | named


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Float64 tensors that `dtype` holds exactly: rounding the inputs is not the code's error."""
    return {name: tensor.to(dtype).double() for name, tensor in tensors.items()}


def moved(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors on the device in the working dtype."""
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
