"""A window of softmax by PyTorch's scaled_dot_product_attention, over blocks of queries: every device and dtype."""

from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.softmax import masked_attention
from polysketch.ops.window.types import Inputs, Plan, computed_in

_MULTIPLE = 8  # of a width, for CUDA's fused kernels with a mask
_FEWEST_ROWS, _MOST_ROWS = 64, 256


def attend(inputs: Inputs, plan: Plan) -> Tensor:
    """The window's softmax with one more key, which `_attend_in_blocks` puts before each span of keys.

    One more entry of queries holds its logit, and meets a one in that key alone. One more entry of values is a one for
    that key alone, and so its share of the mass comes out: a difference from one would lose small shares in 16 bits.
    """
    query, key, value, _, beside_logit, beside_value = inputs
    if beside_logit is None or beside_value is None:
        return _attend_in_blocks(inputs, plan)
    (head_dim, value_dim), limit = (query.shape[3], value.shape[3]), torch.finfo(computed_in(query)).max / 4
    # Without a key there: a weight of zero, and a gradient that is a number.
    logit = beside_logit.to(query.dtype).clamp(-limit, limit)[..., None]
    more_key, more_value = (1 + (-(width + 1) % _MULTIPLE if query.is_cuda else 0) for width in (head_dim, value_dim))
    query = F.pad(torch.cat([query * plan.scale, logit], -1), (0, more_key - 1))
    key, value = F.pad(key, (0, more_key)), F.pad(value, (0, more_value))
    first = _unit_row(key, head_dim), _unit_row(value, value_dim)
    found = _attend_in_blocks(Inputs(query, key, value, inputs.key_mask), plan._replace(scale=1.0), first)
    near, share = found[..., :value_dim], found[..., value_dim : value_dim + 1]
    none = (beside_logit == float("-inf"))[..., None]
    return near + share.masked_fill(none, 0.0) * beside_value.to(near.dtype)


def _unit_row(like: Tensor, entry: int) -> Tensor:
    """(batch, heads, 1, width): one token of zeros, but a one at `entry`."""
    row = like.new_zeros(*like.shape[:2], 1, like.shape[3])
    row[..., entry] = 1.0
    return row


def _rows_together(seen: int, device: torch.device) -> int:
    """Queries that are worked on together, over seen + rows - 1 keys; measured on a CPU with heads of 64."""
    return min(max(_FEWEST_ROWS, seen // 2), _MOST_ROWS) if device.type == "cpu" else _MOST_ROWS


def _attend_in_blocks(inputs: Inputs, plan: Plan, first: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Rows of some queries at a time, each over the span of keys that some row of it sees.

    Every span begins with the key and value of `first`, (batch, key_heads, 1, width) each, if there are any.
    """
    query, key, value, key_mask, *_ = inputs
    length, earlier = query.shape[2], key.shape[2] - query.shape[2]
    behind, ahead = plan.behind, min(plan.ahead, length - 1)
    rows = min(_rows_together(behind + ahead + 1, query.device), length)
    span = behind + rows + ahead
    # The span of row block t starts `behind` tokens before its first query; beyond the ends it holds padding.
    padding = (behind - earlier, -length % rows + ahead)
    keys, values = (F.pad(x, (0, 0, *padding)).unfold(2, span, rows).unbind(2) for x in (key, value))
    real = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    reals = F.pad(real, padding, value=False).unfold(1, span, rows).unbind(1)
    # Blocks that do not fit into the rows worked on together fall elsewhere in each of them.
    starts = range(0, length, rows) if plan.block and rows % plan.block else (0,)
    nears = [
        plan.seen(range(start, start + rows), range(start - behind, start + rows + ahead), key.device)
        for start in starts
    ]
    if first is not None:
        keys = tuple(torch.cat([first[0].mT, x], -1) for x in keys)
        values = tuple(torch.cat([first[1].mT, x], -1) for x in values)
        # Not by a padding of true: Inductor (2.13) writes C++ for it that does not compile.
        reals = tuple(torch.cat([torch.ones_like(x[:, :1]), x], 1) for x in reals)
        nears = [torch.cat([torch.ones_like(near[:, :1]), near], 1) for near in nears]
    outputs = [
        masked_attention(q, k.mT, v.mT, plan.scale, allowed=near[: q.shape[2]] & mask[:, None, None, :])
        for q, k, v, mask, near in zip(query.split(rows, 2), keys, values, reals, cycle(nears))
    ]
    return torch.cat(outputs, 2)
