"""Prepared attention calls with random inputs, for any device and dtype: timed here, measured for memory there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.floors import Shape
from polysketch import attention, ops

DEGREE = 4


class Call(NamedTuple):
    """A function of nothing, and the tensors to differentiate by."""

    function: Callable[[], Tensor]
    leaves: list[Tensor]


def sdpa(shape: Shape, device: torch.device, dtype: torch.dtype, *, backend: SDPBackend | None = None) -> Call:
    """Causal `scaled_dot_product_attention`; `backend` alone, or PyTorch's own choice."""
    query, key, value = _heads(shape, device, dtype)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def attend_by_backend() -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    return Call(attend if backend is None else attend_by_backend, [query, key, value])


def linear(shape: Shape, device: torch.device, dtype: torch.dtype, *, sketch_size: int, local: int) -> Call:
    """`linear_attention` of power 2 with exact local chunks, the features given."""
    query, key, value = _heads(shape, device, dtype)
    features = [_random(shape, sketch_size, device, dtype) for _ in range(2)]

    def attend() -> Tensor:
        exact = ops.LocalPolynomial(query, key, DEGREE, local)
        return ops.linear_attention(*features, value, power=2, causal=True, offset=1.0, local=exact).output

    return Call(attend, [*features, query, key, value])


def polysketch(shape: Shape, device: torch.device, dtype: torch.dtype, *, sketch_size: int, local: int) -> Call:
    """The whole mechanism: norms, the learned sketch of queries and keys, attention."""
    options = {"sketch_size": sketch_size, "local_chunk": local, "degree": DEGREE}
    module = attention.build("polysketch", num_heads=shape.heads, head_dim=shape.head_dim, **options)
    module = module.to(device, dtype)
    tensors = _heads(shape, device, dtype)
    return Call(lambda: module(*tensors), [*tensors, *module.parameters()])


def polynomial(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """Exact polynomial attention."""
    tensors = _heads(shape, device, dtype)
    return Call(lambda: ops.polynomial_attention(*tensors, degree=DEGREE, causal=True), tensors)


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


def _random(shape: Shape, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.batch, shape.heads, shape.length, width, device=device, dtype=dtype)


def _heads(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value."""
    return [_random(shape, shape.head_dim, device, dtype) for _ in range(3)]
