"""Cross-entropy of each token without ever holding the logits of all of them."""

from typing import Any

import torch
from torch import Tensor

from polysketch.models import output_layer
from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.targets import NO_TARGET


def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T + bias)[target] of every token, in chunks of tokens recomputed in backward.

    Logits, softmax and sums are float32 or better whatever the dtype of the inputs: bfloat16 logits would put an error
    of up to 0.06 nats on a loss. Under autocast, hidden and weight are first rounded to the autocast dtype.

    Args:
        hidden: (batch, length, hidden_size), floating.
        weight: (vocab_size, hidden_size), floating.
        bias: (vocab_size,), floating.
        targets: (batch, length) int64; where it is `NO_TARGET` (-100) the loss is 0.

    Returns:
        (batch, length) float32 (float64 for float64 inputs), nats.

    Raises:
        ValueError: hidden and targets of different shapes.

    Cost: forward 1 and backward 3 multiply-adds per token, vocabulary entry and channel. Memory beyond the gradients:
    64 MB for each copy of a chunk's logits, 256 on a CUDA device, and for 16-bit weights a float32 sum of their
    gradient.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} must agree in batch and length"
        )
    return _token_losses(output_layer.rows_to_multiply(hidden), weight, bias, targets.flatten()).view(targets.shape)


@custom_op("polysketch::token_losses")
def _token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """(tokens, hidden_size), (vocab, hidden_size), (vocab,), (tokens,) -> (tokens,)."""
    chunk = output_layer.chunk_tokens(weight)
    compute_weight = weight.to(hidden.dtype)
    losses = [
        _losses(output_layer.logits_of(rows, compute_weight, bias), target)
        for rows, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses)


@custom_op("polysketch::token_losses_backward")
def _token_losses_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; logits are made again, chunk by chunk."""
    return output_layer.gradients(
        hidden, weight, bias, lambda part, logits: _grad_logits(logits, targets[part], grad[part])
    )


@_token_losses.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return bias.new_empty(hidden.shape[0], dtype=output_layer.wide(bias.dtype))


@_token_losses_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*_token_losses_backward(grad, *ctx.saved_tensors), None)


_token_losses.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.token_losses)
def _forward_flops(hidden: tuple, weight: tuple, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


@counts_operations_of(torch.ops.polysketch.token_losses_backward)
def _backward_flops(_grad: tuple, hidden: tuple, weight: tuple, *_: Any, **__: Any) -> int:
    return 3 * _forward_flops(hidden, weight)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    ignored = targets == NO_TARGET
    target_logits = logits.gather(1, targets.masked_fill(ignored, 0)[:, None])[:, 0]
    return (logits.logsumexp(1) - target_logits).masked_fill(ignored, 0.0)


def _grad_logits(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """(softmax - one-hot) * grad, built in place of the softmax."""
    ignored = targets == NO_TARGET
    grad = grad.masked_fill(ignored, 0.0)[:, None]
    probabilities = logits.softmax(1).mul_(grad)
    return probabilities.scatter_add_(1, targets.masked_fill(ignored, 0)[:, None], -grad)
