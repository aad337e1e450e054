"""A window of softmax by its definition: quadratic, plain PyTorch, the oracle of every other backend."""

import torch
from torch import Tensor

from polysketch.ops.window.types import Inputs, Plan


def attend(inputs: Inputs, plan: Plan) -> Tensor:
    """o_i = sum_j softmax_j(scale * q_i . k_j) v_j over -ahead <= i - j <= behind and to the end of the block of i,
    all weights at once.

    Differentiable by autograd as often as wanted, in forward mode too. Memory: n times m numbers a head.
    """
    query, key, value, key_mask, beside_logit, beside_value = inputs
    if key_mask is not None:
        key, value = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (key, value))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    length, earlier = query.shape[2], key.shape[2] - query.shape[2]
    seen = plan.seen(range(length), range(-earlier, length), key.device)
    seen = seen if key_mask is None else seen & key_mask[:, None, None, :]
    logits = (query @ key.mT * plan.scale).masked_fill(~seen, float("-inf"))
    if beside_logit is not None:
        logits = torch.cat([logits, beside_logit[..., None].to(logits.dtype)], -1)
    blind = (logits == float("-inf")).all(-1, keepdim=True)  # 0 / 0 otherwise, in its gradient too
    weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    output = weights[..., : key.shape[2]] @ value
    return output if beside_value is None else output + weights[..., -1:] * beside_value.to(output.dtype)
