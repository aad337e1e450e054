"""How far a result may be off: beside the plain formula in the same dtype, or by a tolerance; against float64.

An output may be off by twice, a gradient by three times as much as the plain formula in the same dtype on the same
device, by the norm of the error and by its largest entry; and the same call twice gives the same bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from polysketch.benchmarking.agreement import relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_SLACK = {torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 1e-5}
"""Of the size of a tensor, allowed besides: where the plain formula happens to round next to nothing."""
_OVERFLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed where the plain formula is not finite itself."""
_POISON_SIZES = [2**exponent for exponent in range(8, 25)]

Named = dict[str, Tensor]
Function = Callable[..., Mapping[str, Tensor]]


@dataclass(frozen=True)
class Device:
    """Where a test runs: "cpu", "interpreter" (Triton's, on a CPU) or "cuda"."""

    name: str

    @property
    def where(self) -> torch.device:
        """The device of the tensors."""
        return torch.device("cuda" if self.name == "cuda" else "cpu")

    @property
    def small(self) -> bool:
        """Whether sizes are to be small."""
        return self.name != "cuda"

    def backends(self, names: Mapping[str, object], why_not: Callable[[str], str | None]) -> list[str]:
        """Those to compare with the reference: the interpreter's is the triton backend; else all that run here."""
        wanted = ["triton"] if self.name == "interpreter" else [name for name in names if name != "reference"]
        return [name for name in wanted if why_not(name) is None]


@contextmanager
def named(backend: str) -> Iterator[None]:
    """What is raised within this block says which backend it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"by the backend {backend}")
        raise


def refusal(ask: Callable[[], object]) -> str | None:
    """Why a backend cannot run, as the function that resolves it says; None where it can."""
    try:
        ask()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next allocations get, so that nothing passes by reading or leaving it as is."""
    if device.type == "cpu":
        return  # deterministic algorithms fill fresh memory there
    blocks = [torch.full((size,), torch.nan, device=device) for size in _POISON_SIZES for _ in range(2)]
    del blocks


def usable(device: torch.device) -> bool:
    """Whether the device still computes."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def with_gradients(function: Function, leaves: Mapping[str, Tensor], parameters: Mapping[str, Tensor] = {}) -> Named:
    """What `function` makes of the leaves, and gradients of leaves and parameters under fixed random cotangents.

    The cotangents are drawn in float64 on the CPU: the same for every device and dtype.
    """
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    outputs = dict(function(**leaves))
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(tuple(x.shape), generator=generator, dtype=torch.float64) for x in outputs.values()]
    cotangents = [c.to(x.device, x.dtype) for c, x in zip(drawn, outputs.values(), strict=True)]
    wanted = {**leaves, **parameters}
    found = torch.autograd.grad(
        list(outputs.values()), list(wanted.values()), cotangents, allow_unused=True, materialize_grads=True
    )
    gradients = {f"gradient of {name}": gradient for name, gradient in zip(wanted, found, strict=True)}
    return {name: output.detach() for name, output in outputs.items()} | gradients


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Named:
    """Float64 tensors that `dtype` holds exactly: rounding the inputs is not the code's error."""
    return {name: tensor.to(dtype).double() for name, tensor in tensors.items()}


def moved(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Named:
    """The tensors on the device in the working dtype."""
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def assert_within(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, record=None) -> None:
    """Every tensor expected is found, off by at most `tolerance` of its size; `record` is told the worst."""
    errors = {name: relative_error(found[name], tensor) for name, tensor in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    if record is not None:
        record("worst", worst)
        record("relative_error", _number(errors[worst]))
    assert errors[worst] <= tolerance, f"{worst} is off by {errors[worst]:.2g}, allowed {tolerance:g}: {errors}"


def assert_as_good_as_plain(
    attend: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    record=None,
) -> None:
    """`attend` errs as the plain formula errs in that dtype, and gives the same bits twice.

    Args:
        attend: gives the output, of tensors by the names of `inputs`.
        formula: the same in plain PyTorch, every intermediate in the dtype of the inputs.
        inputs: in float64 on the CPU.
        record: is told both ratios.
    """
    inputs = rounded(inputs, dtype)
    given = moved(inputs, device, dtype)
    exact = _run(formula, moved(inputs, device, torch.float64))
    plain = _run(formula, given)
    poison(device)
    found, again = _run(attend, given), _run(attend, given)
    shares = {name: _share(name, found[name], plain[name], exact[name], dtype) for name in exact}
    worst = max(shares, key=lambda name: shares[name])
    if record is not None:
        record("output_ratio", _number(shares["output"] * OUTPUT_FACTOR))
        gradients = [share for name, share in shares.items() if name != "output"]
        record("gradient_ratio", _number(max(gradients, default=0.0) * GRADIENT_FACTOR))
        record("worst", worst)
    assert shares[worst] <= 1, f"{worst} errs more than allowed beside the plain formula: shares of it {shares}"
    moving = [name for name, tensor in found.items() if not torch.equal(tensor, again[name])]
    assert not moving, f"not the same twice: {moving}"


def _run(attend: Callable[..., Tensor], tensors: Named) -> Named:
    return with_gradients(lambda **leaves: {"output": attend(**leaves)}, tensors)


def _share(name: str, found: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Of what is allowed; above 1 is too much."""
    factor = OUTPUT_FACTOR if name == "output" else GRADIENT_FACTOR
    pairs = zip(_errors(found, exact), _errors(plain, exact), strict=True)
    return max(_share_of(error, plain_error, factor, dtype) for error, plain_error in pairs)


def _share_of(error: float, plain_error: float, factor: float, dtype: torch.dtype) -> float:
    if not math.isfinite(error):
        return math.inf
    if not math.isfinite(plain_error):
        return error / _OVERFLOWED[dtype]
    return error / (factor * plain_error + _SLACK[dtype])


def _errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """By norm and by largest entry, each over that of the exact tensor; infinite where anything is not finite."""
    difference, exact = (found.double() - exact).flatten(), exact.flatten()
    pairs = (difference.norm(), exact.norm()), (difference.abs().max(), exact.abs().max())
    errors = [float(error) / max(float(size), 1e-12) for error, size in pairs]
    return tuple(error if math.isfinite(error) else math.inf for error in errors)  # type: ignore[return-value]


def _number(value: float) -> float | str:
    return round(value, 9) if math.isfinite(value) else "not finite"  # JSON has no infinity
