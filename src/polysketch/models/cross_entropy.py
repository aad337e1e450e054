"""Cross-entropy of each token without ever holding the logits of all of them."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of

IGNORED_TARGET = -100
_CHUNK_LOGITS = 2**24  # logits held at a time: 64 MB in float32, whatever the vocabulary
_BLOCK_WEIGHTS = 2**19  # weights held as float32 at a time where the product needs them so: 2 MB, in a core's cache


def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T + bias)[target] of every token, in chunks of tokens recomputed in backward.

    Logits, softmax and sums are float32 or better whatever the dtype of the inputs: bfloat16 logits would put an error
    of up to 0.06 nats on a loss. Under autocast, hidden and weight are first rounded to the autocast dtype.

    Args:
        hidden: (batch, length, hidden_size), floating.
        weight: (vocab_size, hidden_size), floating.
        bias: (vocab_size,), floating.
        targets: (batch, length) int64; where it is `IGNORED_TARGET` (-100) the loss is 0.

    Returns:
        (batch, length) float32 (float64 for float64 inputs), nats.

    Raises:
        ValueError: hidden and targets of different shapes.

    Cost: forward 1 and backward 3 multiply-adds per token, vocabulary entry and channel. Memory beyond the gradients:
    64 MB for each copy of a chunk's logits, and for 16-bit weights a float32 sum of their gradient.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} must agree in batch and length"
        )
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    losses = _token_losses(hidden.flatten(0, -2).to(dtype), weight, bias, targets.flatten())
    return losses.view(targets.shape)


@custom_op("polysketch::token_losses")
def _token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """(tokens, hidden_size), (vocab, hidden_size), (vocab,), (tokens,) -> (tokens,)."""
    chunk = _chunk_tokens(weight)
    compute_weight = weight.to(hidden.dtype)
    losses = [
        _losses(_logits(rows, compute_weight, bias), target)
        for rows, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(losses)


@custom_op("polysketch::token_losses_backward")
def _token_losses_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; logits are made again, chunk by chunk."""
    chunk = _chunk_tokens(weight)
    compute_weight = weight.to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden)
    # Sums over the chunks, in float32: in bfloat16 the later chunks of a long text would be rounded away.
    grad_weight, grad_bias = (torch.zeros_like(each, dtype=_wide(each.dtype)) for each in (weight, bias))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        grad_logits = _grad_logits(_logits(hidden[part], compute_weight, bias), targets[part], grad[part])
        grad_bias += grad_logits.sum(0)
        grad_logits = grad_logits.to(hidden.dtype)
        grad_hidden[part] = grad_logits @ compute_weight
        grad_weight += grad_logits.T @ hidden[part]
    return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


@_token_losses.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return bias.new_empty(hidden.shape[0], dtype=_wide(bias.dtype))


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


def _chunk_tokens(weight: Tensor) -> int:
    return max(1, _CHUNK_LOGITS // weight.shape[0])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or better where the dtype is."""
    return torch.promote_types(dtype, torch.float32)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(tokens, vocab), float32 or better."""
    product = rows @ weight.T if rows.dtype == _wide(rows.dtype) else _wide_product(rows, weight)
    return product.to(_wide(bias.dtype)).add_(bias)


def _wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """The product of 16-bit (tokens, hidden_size) and (vocab, hidden_size), its sums not rounded: float32."""
    with torch.autocast(rows.device.type, enabled=False):  # which would round the sums after all
        if _multiplies_into_float32(rows.device):
            return torch.mm(rows, weight.T, out_dtype=torch.float32)
        product = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        rows, entries = rows.float(), max(1, _BLOCK_WEIGHTS // weight.shape[1])
        for block, columns in zip(weight.split(entries), product.split(entries, dim=1), strict=True):
            torch.mm(rows, block.float().T, out=columns)
        return product


def _multiplies_into_float32(device: torch.device) -> bool:
    """Whether the device takes 16-bit matrices and gives their product in float32 (CUDA, from torch 2.8 on)."""
    return device.type == "cuda" and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype")


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
