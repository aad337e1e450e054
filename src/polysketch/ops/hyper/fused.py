"""Attention with the log of its sums by PyTorch's fused CPU kernel, which its public function keeps to itself."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_NAME = "_scaled_dot_product_flash_attention_for_cpu"  # in every PyTorch that we support, though not documented


def can_fuse(query: Tensor) -> bool:
    """Whether the kernel is there for tensors like this one."""
    return query.device.type == "cpu" and hasattr(torch.ops.aten, _NAME)


class FusedAttention(torch.autograd.Function):
    """(output, log_sum) of query (leads, tiles, rows, head_dim), key and value (leads, tiles or 1, keys, width).

    The bias (leads, tiles, keys) or None is added to the scores, and has no gradient; not with `causal`, which needs
    as many rows as keys.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, causal, scale):
        bias = None if bias is None else bias.unsqueeze(2)
        wide = _equal_widths(query, *(x.expand(-1, query.shape[1], -1, -1) for x in (key, value)))
        output, log_sum = getattr(torch.ops.aten, _NAME)(*wide, 0.0, causal, attn_mask=bias, scale=scale)
        ctx.save_for_backward(query, key, value, bias, output, log_sum)
        ctx.causal, ctx.scale = causal, scale
        if bias is not None:  # rows that see nothing have a sum of 1 in the kernel
            log_sum = log_sum.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
        return output[..., : value.shape[3]], log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_log_sum):
        query, key, value, bias, output, log_sum = ctx.saved_tensors
        wide = _equal_widths(query, *(x.expand(-1, query.shape[1], -1, -1) for x in (key, value)))
        grad_output = F.pad(grad_output, (0, output.shape[3] - grad_output.shape[3]))
        steered = _steered(output, grad_output, grad_log_sum)
        backward = getattr(torch.ops.aten, f"{_NAME}_backward")
        options = {"attn_mask": bias, "scale": ctx.scale}
        grads = backward(grad_output, *wide, steered, log_sum, 0.0, ctx.causal, **options)
        pairs = zip(grads, (query, key, value), strict=True)
        return *(grad[..., : x.shape[3]].sum_to_size(x.shape) for grad, x in pairs), None, None, None


def _steered(output: Tensor, grad_output: Tensor, grad_log_sum: Tensor) -> Tensor:
    """An output with which the kernel's backward pass gives the gradient through the log sum, too.

    It computes weights * (grad_output . value - grad_output . output), and wanted is + grad_log_sum: the output less
    grad_log_sum along grad_output. Where parts are merged, grad_output is zero only where grad_log_sum is.
    """
    norm = torch.linalg.vector_norm(grad_output, dim=-1, keepdim=True)
    along = grad_output / norm.masked_fill(norm == 0, 1.0)
    return output - along * (grad_log_sum.unsqueeze(-1) / norm.masked_fill(norm == 0, torch.inf))


def _equal_widths(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, or values, with zeros behind: the kernel takes one width."""
    width = max(key.shape[3], value.shape[3])
    return tuple(F.pad(x, (0, width - x.shape[3])) for x in (query, key, value))
