"""The operator of `part` by PyTorch's fused CPU kernel, whose log sums its public function keeps to itself."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.hyper import products

_NAME = "_scaled_dot_product_flash_attention_for_cpu"


def fits(query: Tensor, value: Tensor, bias: Tensor | None, causal: bool) -> bool:
    """Whether the kernel computes this; it takes a bias or is causal, not both, and wants values."""
    wanted = value.shape[-1] > 0 and (bias is None or not causal)
    return query.device.type == "cpu" and wanted and kernel_agrees()


@cache
def kernel_agrees() -> bool:
    """Whether the kernel is there and gives on a few numbers what products give: it is not public, and may change."""
    generator = torch.Generator().manual_seed(0)
    query, grad = torch.randn(2, 1, 2, 3, 4, generator=generator, device="cpu")
    key, value = torch.randn(2, 1, 5, 4, generator=generator, device="cpu")
    bias = torch.tensor([[0.0, -torch.inf, 1.0, -1.0, 0.0], [-torch.inf] * 5], device="cpu")[None]
    try:
        found = attend(query, key, value, bias, False, 0.5)
        grads = attend_backward(grad, grad[..., 0], query, key, value, bias, *found, False, 0.5)
    except (AttributeError, TypeError, RuntimeError):
        return False
    expected = products.attend(query, key, value, bias, False, 0.5)
    wanted = products.attend_backward(grad, grad[..., 0], query, key, value, bias, *expected, False, 0.5)
    pairs = zip((*found, *grads), (*expected, *wanted), strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log sum of `attend_part`."""
    mask = None if bias is None else bias.unsqueeze(2)
    wide = _equal_widths(query, *(x.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in (key, value)))
    output, log_sum = getattr(torch.ops.aten, _NAME)(*wide, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:  # rows that see nothing have a sum of 1 in the kernel
        log_sum = log_sum.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
    return output[..., : value.shape[2]].contiguous(), log_sum.contiguous()


def attend_backward(
    grad_output: Tensor,
    grad_log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    mask = None if bias is None else bias.unsqueeze(2)
    wide = _equal_widths(query, *(x.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in (key, value)))
    missing = (0, wide[2].shape[3] - value.shape[2])
    of_output = (_steered(output, grad_output, grad_log_sum), grad_output)
    steered, grad_output = (_in_rows(F.pad(x, missing)) for x in of_output)
    log_sum = log_sum.masked_fill(log_sum == -torch.inf, 0.0)  # as the kernel has it
    backward = getattr(torch.ops.aten, f"{_NAME}_backward")
    grads = backward(grad_output, *wide, steered, log_sum, 0.0, causal, attn_mask=mask, scale=scale)
    grad_query, grad_key, grad_value = (
        grad[..., : x.shape[-1]] for grad, x in zip(grads, (query, key, value), strict=True)
    )
    return grad_query.contiguous(), grad_key.sum(1), grad_value.sum(1)


def _steered(output: Tensor, grad_output: Tensor, grad_log_sum: Tensor) -> Tensor:
    """An output with which the kernel's backward pass gives the gradient through the log sum, too.

    It computes weights * (grad_output . value - grad_output . output), and wanted is + grad_log_sum: the output less
    grad_log_sum along grad_output. Where parts are merged, grad_output is zero only where grad_log_sum is, too.
    """
    norm = torch.linalg.vector_norm(grad_output, dim=-1, keepdim=True)
    norm = norm.masked_fill(norm == 0, torch.inf)
    return output - grad_output / norm * (grad_log_sum.unsqueeze(-1) / norm)


def _equal_widths(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries and keys, or values, with zeros behind: the kernel takes one width."""
    width = max(key.shape[3], value.shape[3])
    return [_in_rows(F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x) for x in (query, key, value)]


def _in_rows(x: Tensor) -> Tensor:
    """x with the numbers of a token side by side, as the kernel takes for granted: it would read others."""
    return x if x.stride(-1) == 1 else x.contiguous()
