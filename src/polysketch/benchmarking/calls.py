"""Prepared attention calls with random inputs, for any device and dtype: timed here, measured for memory there.

Features are such that sketched weights hold a fair share of the attention mass: else a check of the result would be
blind to half of the computation.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polysketch import ops
from polysketch.benchmarking.floors import Shape
from polysketch.nn.glu import gated_width
from polysketch.ops.cross_entropy import cross_entropy_
from polysketch.ops.gated_gelu import gated_gelu
from polysketch.ops.head_sketch import head_sketch
from polysketch.ops.low_rank_sketch import low_rank_sketch
from polysketch.ops.rotated_heads import rotated_heads

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
    """`scaled_dot_product_attention`; `backend` alone, or PyTorch's own choice."""
    return sdpa_of(heads(shape, device, dtype), causal=shape.causal, backend=backend)


def sdpa_of(tensors: list[Tensor], *, causal: bool = True, backend: SDPBackend | None = None) -> Call:
    """`scaled_dot_product_attention` of a query, key and value that are given."""
    query, key, value = tensors

    def attend() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return Call(attend, tensors)


def linear(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    features: int,
    local: int = 0,
    decays: bool = False,
    shared: int = 1,
    **options: Any,
) -> Call:
    """`linear_attention` over given features: of power 2, with an offset of 1, unless options say otherwise.

    Args:
        features: of a query or key.
        local: tokens of a chunk with exact weights; 0 for none.
        decays: whether every token has a decay.
        shared: queries of a key.
        **options: of the op.
    """
    keys = replace(shape, heads=shape.heads // shared)
    # Two such features weigh, squared, what (q . k)^4 of normal q and k / sqrt(head_dim) does: 3 in the mean.
    drawn = [(3 / features) ** 0.25 * random(each, device, dtype, features) for each in (shape, keys)]
    leaves = [x.abs() if options.get("power") == 1 else x for x in drawn]  # of which all weights must be positive
    leaves.append(random(keys, device, dtype))
    if local:
        leaves += [random(shape, device, dtype), random(keys, device, dtype) / shape.head_dim**0.5]
    if decays:
        leaves.append(-0.01 * random(keys, device, dtype)[..., 0].abs())
    return _linear(leaves, local, decays, {"power": 2, "causal": shape.causal, "offset": 1.0, **options})


def _linear(leaves: list[Tensor], local: int, decays: bool, options: dict[str, Any]) -> Call:
    query, key, value, *rest = leaves

    def attend() -> Tensor:
        near = ops.LocalPolynomial(rest[0], rest[1], DEGREE, local) if local else None
        decay = rest[-1] if decays else None
        return ops.linear_attention(query, key, value, local=near, log_decay=decay, **options).output

    return Call(attend, leaves, lambda: _linear(exact(leaves), local, decays, {**options, "backend": "reference"}))


def delta(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, features: int, factors: int = 2, **options: Any
) -> Call:
    """What tokens write by the delta rule, of sketches of length one."""
    parts = random(shape, device, dtype, features).unflatten(-1, (factors, -1))
    key, value = F.normalize(parts, dim=-1).flatten(-2), random(shape, device, dtype)
    leaves = [key, value, random(shape, device, dtype)[..., 0].sigmoid()]
    return Call(lambda: ops.delta_writes(*leaves, factors=factors, **options), leaves)


def low_rank(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, features: int, degree: int, rank: int = 1, **options: Any
) -> Call:
    """The low-rank sketch, by factors that keep the size of what they map."""
    factors = torch.randn(1, rank, degree, shape.head_dim, features, device=device) * shape.head_dim**-0.5
    leaves = [random(shape, device, dtype), factors.to(dtype)]
    return Call(lambda: low_rank_sketch(*leaves, **options), leaves)


def normed_heads(shape: Shape, device: torch.device, dtype: torch.dtype, *, sketch_size: int, **options: Any) -> Call:
    """Norm of heads and, for a size above 0, their random sketch of degree 4, laid side by side."""
    scale, bias = (torch.randn(shape.head_dim, device=device).to(dtype) for _ in range(2))
    sizes = (1, 2, shape.head_dim, sketch_size)
    matrices = (torch.randn(sizes, device=device) * shape.head_dim**-0.5).to(dtype) if sketch_size else None
    x = random(shape, device, dtype)

    def attend() -> Tensor:
        normed, features = head_sketch(x, scale, bias, matrices, **options)
        return normed if features is None else torch.cat([normed, features], -1)

    return Call(attend, [x, scale, bias])


def convolution(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    size: int,
    by_head: bool = False,
    continued: bool = False,
    **options: Any,
) -> Call:
    """A causal convolution, by float32 filters, of the projections of a layer: queries, keys and values side by side.

    Args:
        size: taps of a filter.
        by_head: of values instead, whose heads share filters.
        continued: whether there are tokens before these, and a mask.
        **options: of the op.
    """
    projected = shape if by_head else replace(shape, heads=1, head_dim=3 * shape.heads * shape.head_dim)
    leaves = [random(projected, device, dtype), torch.randn(1, projected.head_dim, size, device=device)]
    if continued:
        leaves.append(random(replace(projected, length=size - 1), device, dtype))
        options["key_mask"] = torch.arange(shape.length, device=device).expand(shape.batch, -1) % 7 != 3

    def convolve() -> Tensor:
        tail = leaves[2] if continued else None
        return ops.causal_convolution(leaves[0], leaves[1], tail=tail, **options)[0]

    return Call(convolve, leaves)


def turned_heads(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    norms: bool = True,
    rotates: bool = True,
    keep_normed: bool = False,
    **options: Any,
) -> Call:
    """Norm and rotation of heads that lie as a projection makes them, what is made of them side by side.

    Args:
        norms, rotates: which of both.
        keep_normed: whether normed heads are given beside rotated ones.
        **options: of the op.
    """
    x = random(shape, device, dtype).transpose(1, 2).contiguous().transpose(1, 2)
    scale = torch.randn(shape.heads * shape.head_dim, device=device) if norms else None
    angles = torch.randn(shape.length, shape.head_dim // 2, device=device) if rotates else None
    turn = (None, None) if angles is None else (angles.cos(), angles.sin())

    def attend() -> Tensor:
        made = rotated_heads(x, scale, *turn, keep_normed=keep_normed, **options)
        first, *others = (one for one in made if one is not None)
        return torch.cat([first, *others], -1) if others else first

    return Call(attend, [x] if scale is None else [x, scale])


def gated(shape: Shape, device: torch.device, dtype: torch.dtype, **options: Any) -> Call:
    """The middle of a gated linear unit beside such heads; options are the op's."""
    joined = random(replace(shape, heads=1, head_dim=2 * gated_width(shape.heads * shape.head_dim)), device, dtype)
    return Call(lambda: gated_gelu(joined, **options), [joined])


def token_losses(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, vocabulary: int, rows: int = 1_024, **options: Any
) -> Call:
    """Cross-entropy of as many tokens as logits are made of at a time, with gradients in the dtype.

    Args:
        vocabulary: its size.
        rows: tokens, or those of the shape where they are fewer.
        **options: of the op.
    """
    size = min(rows, shape.tokens), vocabulary
    logits, bias = (torch.randn(each, device=device) for each in (size, size[1:]))
    targets, divisor = torch.randint(vocabulary, size[:1], device=device), torch.ones((), device=device)
    return Call(lambda: cross_entropy_(logits, bias, targets, divisor, dtype, **options).logits_gradient, [logits])


def window(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, beside: bool = False, shared: int = 1, **options: Any
) -> Call:
    """Softmax within a window, perhaps with a key beside for every query.

    Args:
        beside: whether there is one.
        shared: queries of a key.
        **options: of the op.
    """
    keys = replace(shape, heads=shape.heads // shared)
    leaves = [random(each, device, dtype) for each in (shape, keys, keys)]
    if beside:
        leaves += [random(shape, device, dtype)[..., 0].contiguous(), random(shape, device, dtype)]

    def attend() -> Tensor:
        own = ops.BesideKey(*leaves[3:]) if beside else None
        return ops.sliding_window_attention(*leaves[:3], beside=own, **{"causal": shape.causal, **options})

    return Call(attend, leaves)


def exact(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in float64 on the CPU."""
    return [tensor.detach().cpu().double() for tensor in tensors]


def heads(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Random query, key and value."""
    return [random(shape, device, dtype) for _ in range(3)]


def random(shape: Shape, device: torch.device, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Normal numbers (batch, heads, length, width), by default the width of a head."""
    return torch.randn(shape.batch, shape.heads, shape.length, width or shape.head_dim, device=device).to(dtype)
