"""Prepared attention calls with random inputs, for any device and dtype: timed here, measured for memory there.

Features and gains are such that sketched weights hold a fair share of the attention mass: else a check of the result
would be blind to half of the computation.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from polysketch import attention, ops
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


def sdpa(shape: Shape, device: torch.device, dtype: torch.dtype, *, backend: SDPBackend | None = None) -> Call:
    """Causal `scaled_dot_product_attention`; `backend` alone, or PyTorch's own choice."""
    query, key, value = _heads(shape, device, dtype)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def attend_by_backend() -> Tensor:
        with sdpa_kernel([] if backend is None else [backend]):
            return attend()

    return Call(attend if backend is None else attend_by_backend, [query, key, value])


def linear(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, sketch_size: int, local: int, backend: str = "auto"
) -> Call:
    """`linear_attention` of power 2 with exact local chunks, the features given."""
    tensors = _heads(shape, device, dtype)
    # Two such features weigh, squared, what (q . k)^4 of normal q and k does: 3 head_dim^2 in the mean.
    scale = (3 * shape.head_dim**2 / sketch_size) ** 0.25
    features = [scale * _random(shape, sketch_size, device, dtype) for _ in range(2)]
    return _linear([*features, *tensors], local, backend)


def _linear(leaves: list[Tensor], local: int, backend: str) -> Call:
    query_features, key_features, query, key, value = leaves

    def attend() -> Tensor:
        exact = ops.LocalPolynomial(query, key, DEGREE, local)
        return _attend(query_features, key_features, value, exact, backend)

    return Call(attend, leaves, lambda: _linear(_exact(leaves), local, "reference"))


def _attend(
    query_features: Tensor, key_features: Tensor, value: Tensor, local: ops.LocalPolynomial, backend: str
) -> Tensor:
    """The op as the mechanism calls it."""
    options: dict[str, Any] = {"power": 2, "causal": True, "offset": 1.0, "local": local, "backend": backend}
    return ops.linear_attention(query_features, key_features, value, **options).output


def polysketch(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    sketch_size: int,
    local: int,
    learned: bool = True,
    prefix_gain: float | None = None,
) -> Call:
    """The whole mechanism: norms, the sketch of queries and keys, attention; with a `prefix_gain` also calibrated."""
    tensors = _heads(shape, device, dtype)
    module = _module(shape, tensors, sketch_size, local, learned, prefix_gain)
    leaves = [*tensors, *module.parameters()]
    return Call(lambda: module(*tensors), leaves, lambda: _polysketch_definition(module, tensors))


def polysketch_decoding(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    sketch_size: int,
    local: int,
    learned: bool = True,
    prefix_gain: float = 0.5,
) -> Call:
    """The mechanism when it generates: a span read at once, then one chunk and a token one by one. No gradients."""
    tensors = _heads(shape, device, dtype)
    module = _module(shape, tensors, sketch_size, local, learned, prefix_gain)
    spans = [shape.length - local - 1] + [1] * (local + 1)

    def generate() -> Tensor:
        state, outputs = module.init_state(shape.batch), []
        for span in zip(*(tensor.split(spans, dim=2) for tensor in tensors), strict=True):
            output, state = module.extend(*span, state)
            outputs.append(output)
        return torch.cat(outputs, 2)

    return Call(generate, [*tensors, *module.parameters()], lambda: _polysketch_definition(module, tensors))


def _module(
    shape: Shape, tensors: Sequence[Tensor], sketch_size: int, local: int, learned: bool, prefix_gain: float | None
) -> Any:
    """The mechanism, calibrated on the tensors where it has a gain, on their device and in their dtype."""
    query, key, _ = tensors
    options: dict[str, Any] = {"sketch_size": sketch_size, "local_chunk": local, "degree": DEGREE, "learned": learned}
    sizes = {"num_heads": shape.heads, "head_dim": shape.head_dim}
    module: Any = attention.build("polysketch", **sizes, **options, prefix_gain=prefix_gain).to(query.device)
    if prefix_gain is not None:
        module.calibrate(query.float(), key.float())
    return module.to(query.dtype)


def _polysketch_definition(module: nn.Module, tensors: Sequence[Tensor]) -> Call:
    """Norms, sketch and gain of a copy in float64, then the reference of the op."""
    exact: Any = copy.deepcopy(module).cpu().double()
    query, key, value = tensors = _exact(tensors)

    def attend() -> Tensor:
        normed = exact.query_norm(query), exact.key_norm(key)
        mapped = (query, key) if exact.learned else normed  # a learned sketch begins with norms of its own
        query_features, key_features = exact.feature_map.map_queries(mapped[0]), exact.feature_map.map_keys(mapped[1])
        if exact.prefix_gain is not None:
            query_features = exact.prefix_gain(query_features)
        local = ops.LocalPolynomial(*normed, exact.degree, exact.local_chunk)
        return _attend(query_features, key_features, value, local, "reference")

    return Call(attend, [*tensors, *exact.parameters()])


def polynomial(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """Exact polynomial attention of layer-normed queries and keys."""
    query, key, value = _heads(shape, device, dtype)
    return _polynomial([F.layer_norm(query, query.shape[3:]), F.layer_norm(key, key.shape[3:]), value], "auto")


def _polynomial(leaves: list[Tensor], backend: str) -> Call:
    def attend() -> Tensor:
        return ops.polynomial_attention(*leaves, degree=DEGREE, causal=True, backend=backend)

    return Call(attend, leaves, lambda: _polynomial(_exact(leaves), "reference"))


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


def _exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in float64 on the CPU."""
    return [tensor.detach().cpu().double() for tensor in tensors]


def _random(shape: Shape, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.batch, shape.heads, shape.length, width, device=device, dtype=dtype)


def _heads(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value."""
    return [_random(shape, shape.head_dim, device, dtype) for _ in range(3)]
