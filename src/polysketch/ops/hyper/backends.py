"""Who computes `hyper_attention`: by what a caller asks for, or by what runs where the tensors are."""

from torch import Tensor

from polysketch.ops.hyper import native, triton
from polysketch.ops.hyper.approximate import Options
from polysketch.ops.hyper.self_check import programs_agree
from polysketch.ops.polynomial.reference import working_dtype
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = ("plain", "native", "triton")
"""PyTorch's operations; programs in C++; programs in Triton."""


def check_backend(
    backend: str, query: Tensor, key: Tensor, value: Tensor, sampling: str, capping: tuple[float, float] | None
) -> None:
    """Refuse a backend that is asked for and cannot compute a call.

    Raises:
        ValueError: an unknown name.
        RuntimeError: it cannot, with the reason.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {', '.join(map(repr, BACKENDS))}")
    reason = None if backend == "auto" else why_not(backend, query, key, value, sampling, capping)
    if reason is not None:
        raise RuntimeError(reason)


def why_not(
    backend: str, query: Tensor, key: Tensor, value: Tensor, sampling: str, capping: tuple[float, float] | None
) -> str | None:
    """Why a backend cannot compute a call; None where it can."""
    if backend == "plain":
        return None
    if sampling != "uniform" or capping is not None:
        return (
            f"the {backend} backend has one sum of weights for numerator and denominator: it takes uniform sampling"
            f" without capping, got sampling={sampling!r} and capping={capping}"
        )
    if backend == "triton":
        return triton.why_not(query, key, value)
    dtype = working_dtype(query, key, value)
    return native.why_not(*(x.new_empty(x.shape[3:], dtype=dtype) for x in (query, value)))


def picked_backend(
    backend: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, masked: bool, options: Options
) -> str:
    """The backend that was asked for; for "auto" the programs of the tensors' device where they can, else PyTorch."""
    if backend != "auto":
        return backend
    if options.sampling != "uniform" or options.capping is not None:
        return "plain"
    on_a_device = query.device.type in AUTO_DEVICES and triton.why_not(query, key, value) is None
    if on_a_device and programs_agree(query, key, value, causal, masked):
        return "triton"
    return "plain" if why_not("native", query, key, value, options.sampling, None) else "native"
