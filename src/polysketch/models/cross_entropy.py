"""Cross-entropy of each token without ever holding the logits of all of them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

IGNORED_TARGET = -100
_CHUNK_LOGITS = 2**24  # logits held at a time: 64 MB in float32, whatever the vocabulary


def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T + bias)[target] of every token, in chunks of tokens recomputed in backward.

    Under autocast the product runs in the autocast dtype; the softmax and the sums are float32 or better.

    Args:
        hidden: (batch, length, hidden_size).
        weight: (vocab_size, hidden_size).
        bias: (vocab_size,).
        targets: (batch, length) int64; where it is `IGNORED_TARGET` (-100) the loss is 0.

    Returns:
        (batch, length) float32 (float64 for float64 inputs), nats.

    Raises:
        ValueError: hidden and targets of different shapes.

    Cost: forward 1 and backward 3 multiply-adds per token, vocabulary entry and channel.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} must agree in batch and length"
        )
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    losses = _token_losses(hidden.flatten(0, -2).to(dtype), weight, bias, targets.flatten())
    return losses.view(targets.shape)


@torch.library.custom_op("polysketch::token_losses", mutates_args=())
def _token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """(tokens, hidden_size), (vocab, hidden_size), (vocab,), (tokens,) -> (tokens,)."""
    chunk = _chunk_tokens(weight)
    compute_weight = weight.to(hidden.dtype)
    losses = [
        _losses(_logits(rows, compute_weight, bias), target)
        for rows, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses)


@torch.library.custom_op("polysketch::token_losses_backward", mutates_args=())
def _token_losses_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; logits are made again, chunk by chunk."""
    chunk = _chunk_tokens(weight)
    compute_weight = weight.to(hidden.dtype)
    grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        grad_logits = _grad_logits(_logits(hidden[part], compute_weight, bias), targets[part], grad[part])
        grad_bias += grad_logits.sum(0)
        grad_logits = grad_logits.to(hidden.dtype)
        grad_hidden[part] = grad_logits @ compute_weight
        grad_weight += grad_logits.T @ hidden[part]
    return grad_hidden, grad_weight, grad_bias


@_token_losses.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return bias.new_empty(hidden.shape[0])


@_token_losses_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*_token_losses_backward(grad, *ctx.saved_tensors), None)


_token_losses.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.polysketch.token_losses)
def _forward_flops(hidden: tuple, weight: tuple, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.polysketch.token_losses_backward)
def _backward_flops(_grad: tuple, hidden: tuple, weight: tuple, *_: Any, **__: Any) -> int:
    return 3 * _forward_flops(hidden, weight)


def _chunk_tokens(weight: Tensor) -> int:
    return max(1, _CHUNK_LOGITS // weight.shape[0])


def _logits(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(tokens, vocab), float32 or better."""
    product = rows @ weight.T
    return product.add_(bias) if product.dtype == bias.dtype else product.to(bias.dtype).add_(bias)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    ignored = targets == IGNORED_TARGET
    target_logits = logits.gather(1, targets.masked_fill(ignored, 0)[:, None])[:, 0]
    return (logits.logsumexp(1) - target_logits).masked_fill(ignored, 0.0)


def _grad_logits(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """(softmax - one-hot) * grad, built in place of the softmax."""
    ignored = targets == IGNORED_TARGET
    grad = grad.masked_fill(ignored, 0.0)[:, None]
    probabilities = logits.softmax(1).mul_(grad)
    return probabilities.scatter_add_(1, targets.masked_fill(ignored, 0)[:, None], -grad)
