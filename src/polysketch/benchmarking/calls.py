"""Prepared attention calls with random inputs, for any device and dtype: timed here, measured for memory there.

Features are such that sketched weights hold a fair share of the attention mass: else a check of the result would be
blind to half of the computation.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polysketch import ops
from polysketch.benchmarking.floors import Shape

DEGREE = 4


class Call(NamedTuple):
    """A computation ready to run.

    Attributes:
        function: of nothing.
        leaves: the tensors to differentiate by.
        definition: the same computation by the reference backend, in float64 on the CPU, with leaves in the same order
            and of the same values; None where there is no definition of ours.
        timed: what to time where `function` does more than the computation, so as to give the same every time.
    """

    function: Callable[[], Tensor]
    leaves: list[Tensor]
    definition: Callable[[], "Call"] | None = None
    timed: Callable[[], Tensor] | None = None


def forward(call: Call) -> Callable[[], Any]:
    """The call without gradients."""
    return torch.no_grad()(call.function)


def forward_backward(call: Call) -> Callable[[], Any]:
    """The call and the gradients of all its leaves under a random cotangent."""
    for leaf in call.leaves:
        leaf.requires_grad_()
    with torch.no_grad():
        cotangent = torch.randn_like(call.function())
    return lambda: torch.autograd.grad(call.function(), call.leaves, cotangent)


def sdpa(shape: Shape, device: torch.device, dtype: torch.dtype, *, backend: SDPBackend | None = None) -> Call:
    """Causal `scaled_dot_product_attention`; `backend` alone, or PyTorch's own choice."""
    query, key, value = heads(shape, device, dtype)

    def attend() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return Call(attend, [query, key, value])


def linear(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, sketch_size: int, local: int, backend: str = "auto"
) -> Call:
    """`linear_attention` of power 2 with exact local chunks, the features given."""
    tensors = heads(shape, device, dtype)
    # Two such features weigh, squared, what (q . k)^4 of normal q and k does: 3 head_dim^2 in the mean.
    scale = (3 * shape.head_dim**2 / sketch_size) ** 0.25
    features = [scale * _random(shape, sketch_size, device, dtype) for _ in range(2)]
    return _linear([*features, *tensors], local, backend)


def _linear(leaves: list[Tensor], local: int, backend: str) -> Call:
    query_features, key_features, query, key, value = leaves
    options: dict[str, Any] = {"power": 2, "causal": True, "offset": 1.0, "backend": backend}

    def attend() -> Tensor:
        near = ops.LocalPolynomial(query, key, DEGREE, local)
        return ops.linear_attention(query_features, key_features, value, local=near, **options).output

    return Call(attend, leaves, lambda: _linear(exact(leaves), local, "reference"))


def exact(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in float64 on the CPU."""
    return [tensor.detach().cpu().double() for tensor in tensors]


def heads(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Random query, key and value."""
    return [_random(shape, shape.head_dim, device, dtype) for _ in range(3)]


def _random(shape: Shape, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.batch, shape.heads, shape.length, width, device=device, dtype=dtype)
