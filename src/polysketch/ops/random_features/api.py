"""`random_features` and its `torch.library` operators: shapes for tracing, gradients, operation counts.

PyTorch's operations write and read all features five times, those of keys seven times. A program makes them while the
projections of a few tokens are in a cache, and writes them once. Backward starts from the features, which attention
keeps for its own: nothing is kept besides, and no projection made again.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.random_features import native, reference


def random_features(
    x: Tensor, weight: Tensor, key_constant: Tensor | None, *, kind: str = "softmax", backend: str = "auto"
) -> Tensor:
    """Features whose products estimate a kernel of query and key ("Rethinking Attention with Performers", section 2).

        x' = x inputs^(-1/4),    u = W x',    m = features
        "softmax", key:      m^(-1/2) (exp(min(u - |x'|^2 / 2 - c, 40)) + 1e-6 exp(-c))
        "softmax", query:    m^(-1/2) (exp(u - max u) + 1e-6)
        "relu":              m^(-1/2) (relu(u) + 1e-3)

    Args:
        x: (batch, heads, length, inputs), any strides.
        weight: W, (features, inputs).
        key_constant: c, a number; None for queries.
        kind: "softmax" or "relu".
        backend: "auto" (see `random_features_backend`), "native" or "reference" (the definition).

    Returns:
        (batch, heads, length, features), float32; float64 for an x of float64. The program has e^-87 for smaller
        exponentials.

    Raises:
        ValueError: an unknown kind or backend.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
        NotImplementedError: a tensor with a forward-mode tangent, where the program runs.

    Cost: inputs features multiply-adds and an exponential for each feature, a token and head; as many multiply-adds
    backward.
    """
    if kind not in reference.KINDS:
        raise ValueError(f"unknown kind {kind!r}; known kinds: {', '.join(reference.KINDS)}")
    if random_features_backend(x, weight, backend) == "reference":
        return reference.random_features(x, weight, key_constant, kind)
    return random_features_operator(x, weight, key_constant, kind)


def random_features_backend(x: Tensor, weight: Tensor, backend: str = "auto") -> str:
    """The backend that `random_features` runs for these tensors.

    "auto" picks the native program on a CPU with a compiler, but the definition for less than 16 tokens, for float64,
    and where a gradient of W is wanted.

    Raises:
        ValueError, RuntimeError: as `random_features`.
    """
    if backend not in ("auto", "native", "reference"):
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', 'native', 'reference'")
    if backend == "reference" or (backend == "auto" and torch.compiler.is_exporting()):
        return "reference"  # a graph is for other machines and programs, and for any number of tokens
    reason = native.why_not(x, weight)
    if reason is not None and backend == "native":
        raise RuntimeError(reason)
    return "native" if reason is None else "reference"


@custom_op("polysketch::random_features")
def random_features_operator(x: Tensor, weight: Tensor, key_constant: Tensor | None, kind: str) -> Tensor:
    """The native program's forward."""
    return native.forward(x, weight, key_constant, kind)


@custom_op("polysketch::random_features_backward")
def random_features_backward_operator(
    upstream: Tensor, features: Tensor, x: Tensor, weight: Tensor, key_constant: Tensor | None, kind: str
) -> Tensor:
    """The native program's backward: the gradient of x."""
    return native.backward(upstream, features, x, weight, key_constant, kind)


@random_features_operator.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:3], weight.shape[0], dtype=torch.float32)


@random_features_backward_operator.register_fake
def _(upstream: Tensor, features: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, key_constant, ctx.kind = inputs
    ctx.save_for_backward(output, x, weight, key_constant)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
    return random_features_backward_operator(upstream, *ctx.saved_tensors, ctx.kind), None, None, None


random_features_operator.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.random_features)
def _forward_operations(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * x[2] * x[3] * weight[0]


@counts_operations_of(torch.ops.polysketch.random_features_backward)
def _backward_operations(upstream: Any, features: Any, x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return _forward_operations(x, weight)
