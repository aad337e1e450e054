"""The mean cross-entropy of tokens for training: every logit is made once, and gradients with it."""

from typing import Any

import torch
from torch import Tensor

from polysketch.models import output_layer
from polysketch.models.cross_entropy import token_losses
from polysketch.ops.cross_entropy import cross_entropy_
from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.targets import NO_TARGET


def mean_token_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, count: Tensor | int | None = None
) -> Tensor:
    """The sum of `token_losses` over `count`; gradients are made forward, chunk by chunk, and scaled in backward.

    Gradients of this scalar alone can be made so: those of a loss for each token need what comes after it. Where no
    gradient is asked for, and for float16, whose gradients need the scale of the loss first, it is the sum of
    `token_losses`.

    Args:
        hidden: (batch, length, hidden_size), floating.
        weight: (vocab_size, hidden_size), floating.
        bias: (vocab_size,), floating.
        targets: (batch, length) int64; where it is `NO_TARGET` (-100) the loss is 0.
        count: what the sum is divided by; the number of tokens that have a target where None.

    Returns:
        A scalar, float32 (float64 for float64 inputs), nats; NaN where there is nothing to predict.

    Raises:
        ValueError: hidden and targets of different shapes.
        RuntimeError: a second derivative.

    Cost: 3 multiply-adds per token, vocabulary entry and channel, of which none in backward. Memory: the gradients of
    hidden and weight from forward to backward, where both are held twice; hidden itself is not kept.
    """
    if count is None:
        count = (targets != NO_TARGET).sum()
    rows = output_layer.rows_to_multiply(hidden)
    asked = torch.is_grad_enabled() and any(each.requires_grad for each in (rows, weight, bias))
    if not asked or rows.dtype == torch.float16 or hidden.shape[:-1] != targets.shape:
        return token_losses(hidden, weight, bias, targets).sum() / count
    divisor = torch.as_tensor(count, device=rows.device).to(output_layer.wide(bias.dtype))
    return _mean_loss(rows, weight, bias, targets.flatten(), divisor)[0]


@custom_op("polysketch::mean_token_loss")
def _mean_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, divisor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, hidden_size), (vocab, hidden_size), (vocab,), (tokens,), () -> the loss, and the gradients of three."""
    total = torch.zeros_like(divisor)

    def grad_products(part: slice, products: Tensor) -> tuple[Tensor, Tensor]:
        """That of the logits, and its sum over tokens; losses go to the total."""
        found = cross_entropy_(products, bias, targets[part], divisor, hidden.dtype)
        total.add_(found.losses.sum())
        return found.logits_gradient, found.bias_gradient

    gradients = output_layer.gradients_by_products(hidden, weight, bias, grad_products)
    return total / divisor, *gradients


@_mean_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, divisor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(divisor), torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # else zeros as large as the gradients
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(each is not None for each in of_gradients):
        raise RuntimeError("the mean loss of tokens has no second derivative; torch's cross_entropy of logits has one")
    if grad is None:
        return (None,) * 5
    return (*(saved * grad for saved in ctx.saved_tensors), None, None)


_mean_loss.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.mean_token_loss)
def _flops(hidden: tuple, weight: tuple, *_: Any, **__: Any) -> int:
    return 3 * 2 * hidden[0] * weight[0] * weight[1]
