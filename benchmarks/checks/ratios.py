"""Errors of every backend beside those of the plain formula in the same dtype on the same device; and determinism.

Both are measured against the formula in float64. An output may be off by twice as much as the plain one's and a
gradient by three times, by the norm of the error and by its largest entry; the same call twice gives the same bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import linear, plain
from benchmarks.checks.base import DTYPES, moved, poison, rounded, with_gradients
from polysketch import ops
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.learned_sketch import learned_sketch, learned_sketch_backend
from polysketch.ops.learned_sketch.operators import BACKENDS as SKETCH_BACKENDS
from polysketch.ops.linear.api import BACKENDS as LINEAR_BACKENDS
from polysketch.ops.polynomial.api import POLYNOMIAL_BACKENDS

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_SLACK = {"float32": 1e-6, "bfloat16": 1e-4, "float16": 1e-5}
"""Of the size of a tensor, allowed besides: where the plain formula happens to round next to nothing."""
_OVERFLOWED = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Allowed where the plain formula is not finite itself."""

Named = dict[str, Tensor]
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Ratio:
    """One op at one size, in one dtype.

    Attributes:
        name: op, sizes and options.
        dtype: of the inputs.
        inputs: gives the tensors in float64 on the CPU.
        formula: the plain one, of tensors by those names.
        backends: name -> the op by that backend, of the same tensors.
        why_not: (name of a backend, a tensor) -> why it cannot run, or None.
    """

    name: str
    dtype: str
    inputs: Callable[[], Named]
    formula: Attend
    backends: Mapping[str, Attend]
    why_not: Callable[[str, Tensor], str | None]


def ratios(quick: bool) -> list[Ratio]:
    """Every op in every dtype."""
    found = [one for dtype in DTYPES for kind in (_linear, _sketches, _polynomial) for one in kind(dtype, quick)]
    return found[::4] if quick else found


def run_ratio(one: Ratio, device: torch.device) -> list[dict[str, Any]]:
    """A record for every backend that runs on the device: passed or not, errors over the plain formula's."""
    dtype = DTYPES[one.dtype]
    try:
        inputs = rounded(one.inputs(), dtype)
        given = moved(inputs, device, dtype)
        exact = _run(one.formula, moved(inputs, device, torch.float64))
        usual = {name: _errors(tensor, exact[name]) for name, tensor in _run(one.formula, given).items()}
    except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
        return [_broken(one, "plain", error)]
    like = next(iter(given.values()))
    here = [name for name in one.backends if name != "reference" and one.why_not(name, like) is None]
    return [_compare(one, name, given, exact, usual, device) for name in here]


def _compare(
    one: Ratio, backend: str, given: Named, exact: Named, usual: dict[str, tuple[float, float]], device: torch.device
) -> dict[str, Any]:
    try:
        poison(device)
        found, again = _run(one.backends[backend], given), _run(one.backends[backend], given)
    except Exception as error:  # noqa: BLE001
        return _broken(one, backend, error)
    shares: dict[str, float] = {}
    for name, tensor in found.items():
        factor = OUTPUT_FACTOR if name == "output" else GRADIENT_FACTOR
        shares[name] = max(
            _share(error, plain_error, factor, one.dtype)
            for error, plain_error in zip(_errors(tensor, exact[name]), usual[name], strict=True)
        )
    worst = max(shares, key=lambda name: shares[name])
    moving = [name for name, tensor in found.items() if not torch.equal(tensor, again[name])]
    passed = shares[worst] <= 1 and not moving
    gradients = [share for name, share in shares.items() if name != "output"]
    return {
        "name": one.name,
        "dtype": one.dtype,
        "backend": backend,
        "passed": passed,
        "worst": worst,
        "output_ratio": _number(shares["output"] * OUTPUT_FACTOR),
        "gradient_ratio": _number(max(gradients, default=0.0) * GRADIENT_FACTOR),
        "not_deterministic": moving,
        "errors": {name: [_number(error) for error in _errors(tensor, exact[name])] for name, tensor in found.items()},
        "plain_errors": {name: [_number(error) for error in errors] for name, errors in usual.items()},
    }


def _share(error: float, plain_error: float, factor: float, dtype: str) -> float:
    """Of what is allowed; above 1 is too much."""
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


def _run(attend: Attend, tensors: Named) -> Named:
    return with_gradients(lambda **leaves: {"output": attend(**leaves)}, tensors)


def _broken(one: Ratio, backend: str, error: Exception) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"name": one.name, "dtype": one.dtype, "backend": backend, "passed": False, "error": text}


def _number(value: float) -> float | str:
    return round(value, 9) if math.isfinite(value) else "not finite"  # JSON has no infinity


def _linear(dtype: str, quick: bool) -> Iterator[Ratio]:
    """Sizes and options without a history; a state is checked by `linear`."""
    base = linear.Case(length=1_501, local=256, heads=4, key_heads=4)
    cases = [replace(base, features=size) for size in (16, 32, 64, 128)]
    cases += [replace(base, local=0), replace(base, head_dim=128), replace(base, head_dim=48, features=20)]
    cases += [replace(base, key_heads=2, decays=True, padded=True), replace(base, local=0, key_heads=2, decays=True)]
    cases += [replace(base, power=1, local=0, features=size) for size in (64, 256)]
    cases += [replace(base, power=1, features=64, decays=True), replace(base, causal=False, local=0, padded=True)]
    cases += [replace(base, normalize=False), replace(base, length=1), replace(base, length=257)]
    for case in cases[::3] if quick else cases:
        yield _linear_ratio(linear.small(case) if quick else case, dtype)


def _linear_ratio(case: linear.Case, dtype: str) -> Ratio:
    _, mask, _ = linear.inputs(case, DTYPES[dtype])
    backends = {name: partial(_by_backend, case, mask, name) for name in LINEAR_BACKENDS}
    name = f"linear {case.name}, r={case.features}, h={case.head_dim}"
    return Ratio(
        name, dtype, lambda: linear.inputs(case, DTYPES[dtype])[0], partial(_formula, case, mask), backends, _no_linear
    )


def _by_backend(case: linear.Case, mask: Tensor | None, backend: str, **tensors: Tensor) -> Tensor:
    mask = None if mask is None else mask.to(tensors["query"].device)
    return linear.attend(case, mask, backend, **tensors)["output"]


def _formula(case: linear.Case, mask: Tensor | None, **tensors: Tensor) -> Tensor:
    options = {"power": case.power, "causal": case.causal, "offset": linear.OFFSET, "normalize": case.normalize}
    sizes: dict[str, Any] = {**options, "degree": linear.DEGREE, "local": case.local}
    mask = None if mask is None else mask.to(tensors["query"].device)
    return plain.linear_attention(**tensors, **sizes, key_mask=mask)


def _no_linear(backend: str, like: Tensor) -> str | None:
    return _refusal(lambda: ops.linear_attention_backend(like, like, backend=backend))


def _sketches(dtype: str, quick: bool) -> Iterator[Ratio]:
    for size, width in ((32, 64), (64, 64), (32, 128)):
        yield Ratio(
            f"sketch r={size}, h={width}",
            dtype,
            partial(_sketch_inputs, size, width, 40 if quick else 1_501),
            lambda x, **weights: plain.learned_sketch(x, *weights.values()),
            {name: partial(_sketch_by, name) for name in SKETCH_BACKENDS},
            lambda name, like: _refusal(lambda: learned_sketch_backend(like, name)),
        )


def _sketch_inputs(size: int, width: int, length: int) -> Named:
    torch.manual_seed(0)
    module = LearnedSketch(width, sketch_size=size)
    weights = [weight.detach().double() for network in module.networks for weight in network.weights()]  # type: ignore[operator, union-attr]
    weights = [weight + 0.1 * weight.std().nan_to_num(1.0) * torch.randn_like(weight) for weight in weights]
    x = torch.randn(2, 4, length, width, dtype=torch.float64)
    return {"x": x, **{f"weight_{index:02}": weight for index, weight in enumerate(weights)}}


def _sketch_by(backend: str, x: Tensor, **weights: Tensor) -> Tensor:
    return learned_sketch(x, list(weights.values()), 2, backend=backend)


def _polynomial(dtype: str, quick: bool) -> Iterator[Ratio]:
    for width, causal, degree in ((64, True, 4), (64, False, 4), (128, True, 4), (64, True, 2)):
        options = {"degree": degree, "offset": 1.0, "causal": causal}
        yield Ratio(
            f"polynomial degree {degree}, {'causal' if causal else 'not causal'}, h={width}",
            dtype,
            partial(_polynomial_inputs, width, 70 if quick else 1_501),
            partial(plain.polynomial_attention, **options),  # type: ignore[arg-type]
            {name: partial(ops.polynomial_attention, **options, backend=name) for name in POLYNOMIAL_BACKENDS},
            lambda name, like: _refusal(lambda: ops.polynomial_attention_backend(like, like, backend=name)),
        )


def _polynomial_inputs(width: int, length: int) -> Named:
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    scale = width**-0.25
    heads = {"query": 4, "key": 2, "value": 2}
    return {
        name: (1.0 if name == "value" else scale) * normal(2, count, length, width) for name, count in heads.items()
    }


def _refusal(ask: Callable[[], Any]) -> str | None:
    try:
        ask()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None
