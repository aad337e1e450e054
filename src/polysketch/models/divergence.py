"""How far a model's next-token distribution is from a teacher's, without ever holding the logits of all tokens."""

from typing import Any

import torch
from torch import Tensor

from polysketch.models import output_layer
from polysketch.ops.custom_op import custom_op
from polysketch.ops.operation_counts import counts_operations_of


def token_divergences(
    hidden: Tensor, weight: Tensor, bias: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor
) -> Tensor:
    """KL(teacher || student) of every token, in chunks of tokens recomputed in backward.

        sum_v t_v (log t_v - log s_v),  s = softmax(hidden @ weight.T + bias),  t likewise of the teacher

    This is knowledge distillation at temperature 1 (Hinton et al., 2015, section 2). Logits, softmax and sums are
    float32 or better whatever the dtype of the inputs. Under autocast, hidden states and weights are first rounded to
    the autocast dtype. The teacher's tensors get no gradient.

    Args:
        hidden: (batch, length, hidden_size), floating, the student's.
        weight: (vocab_size, hidden_size), floating.
        bias: (vocab_size,), floating.
        teacher_hidden: (batch, length, teacher_hidden_size), floating.
        teacher_weight: (vocab_size, teacher_hidden_size), floating.
        teacher_bias: (vocab_size,), floating.

    Returns:
        (batch, length) float32 (float64 for float64 inputs), nats, at least 0 but for rounding.

    Raises:
        ValueError: student and teacher differ in batch, length or vocabulary.

    Cost: forward 1 and backward 3 multiply-adds per token, vocabulary entry and channel of the student, and 1 and 1 of
    the teacher. Memory beyond the gradients: 64 MB for each copy of a chunk's logits, of which there are a few; 256 MB
    on a CUDA device.
    """
    if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and teacher_hidden {tuple(teacher_hidden.shape)} must agree in batch and "
            "length"
        )
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"student and teacher must agree in vocabulary, found {weight.shape[0]} and {teacher_weight.shape[0]} "
            "entries"
        )
    teacher = (output_layer.rows_to_multiply(teacher_hidden.detach()), teacher_weight.detach(), teacher_bias.detach())
    return _token_divergences(output_layer.rows_to_multiply(hidden), weight, bias, *teacher).view(hidden.shape[:-1])


@custom_op("polysketch::token_divergences")
def _token_divergences(
    hidden: Tensor, weight: Tensor, bias: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor
) -> Tensor:
    """(tokens, hidden_size), (vocab, hidden_size), (vocab,), and the same of the teacher -> (tokens,)."""
    chunk = output_layer.chunk_tokens(weight)
    compute_weight, teacher_compute_weight = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
    divergences = [
        _divergences(
            output_layer.logits_of(rows, compute_weight, bias),
            output_layer.logits_of(others, teacher_compute_weight, teacher_bias),
        )
        for rows, others in zip(hidden.split(chunk), teacher_hidden.split(chunk), strict=True)
    ]
    return torch.cat(divergences)


@custom_op("polysketch::token_divergences_backward")
def _token_divergences_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; logits are made again, chunk by chunk."""
    teacher_compute_weight = teacher_weight.to(teacher_hidden.dtype)

    def grad_logits(part: slice, logits: Tensor) -> Tensor:
        return _grad_logits(
            logits, output_layer.logits_of(teacher_hidden[part], teacher_compute_weight, teacher_bias), grad[part]
        )

    return output_layer.gradients(hidden, weight, bias, grad_logits)


@_token_divergences.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, *teacher: Tensor) -> Tensor:
    return bias.new_empty(hidden.shape[0], dtype=output_layer.wide(bias.dtype))


@_token_divergences_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, *teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_token_divergences_backward(grad, *ctx.saved_tensors), None, None, None)


_token_divergences.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.token_divergences)
def _forward_flops(
    hidden: tuple, weight: tuple, _bias: tuple, _hidden: tuple, teacher: tuple, *_: Any, **__: Any
) -> int:
    return 2 * hidden[0] * weight[0] * (weight[1] + teacher[1])


@counts_operations_of(torch.ops.polysketch.token_divergences_backward)
def _backward_flops(
    _grad: tuple, hidden: tuple, weight: tuple, _bias: tuple, _hidden: tuple, teacher: tuple, *_: Any, **__: Any
) -> int:
    return 2 * hidden[0] * weight[0] * (3 * weight[1] + teacher[1])


def _divergences(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    log_student, log_teacher = logits.log_softmax(1), teacher_logits.log_softmax(1)
    return log_teacher.exp().mul_(log_teacher.sub_(log_student)).sum(1)


def _grad_logits(logits: Tensor, teacher_logits: Tensor, grad: Tensor) -> Tensor:
    """(student's softmax - teacher's) * grad, built in place of the student's."""
    return logits.softmax(1).sub_(teacher_logits.softmax(1)).mul_(grad[:, None])
