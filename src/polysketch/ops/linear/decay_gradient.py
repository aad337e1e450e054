"""The gradient of the log decay, the same for every backend: it follows from the other gradients."""

import torch
from torch import Tensor

from polysketch.ops.linear.plan import Inputs, Outputs, Plan


def decay_gradient(
    inputs: Inputs, plan: Plan, outputs: Outputs, upstream: Outputs, gradients: dict[str, Tensor]
) -> Tensor:
    """(batch, key_heads, L), from gradients already known.

    With c the running total of log_decay, a sketched weight is homogeneous of degree `power` in its query and in its
    key and proportional to exp(c_i - c_j), so dc_t = (q_t . dq_t - k_t . dk_t) / power; what leaves through the final
    sums is proportional to exp(c) at their boundary.
    """
    accumulate = gradients["query"].dtype
    shared = inputs.query.shape[1] // inputs.key.shape[1]
    of_query = (inputs.query.to(accumulate) * gradients["query"]).sum(-1).unflatten(1, (-1, shared)).sum(2)
    of_query = of_query if plan.causal else 0.0  # keys are only added up: nothing reads them from inside the sequence
    of_key = (inputs.key.to(accumulate) * gradients["key"]).sum(-1)
    gradient = ((of_query - of_key) / plan.power).flip(-1).cumsum(-1).flip(-1)
    if not plan.return_sums:
        return gradient
    leaving = (upstream.sums * outputs.sums).sum((-1, -2)) + (upstream.normalizer * outputs.normalizer).sum(-1)
    chunk, tokens = plan.chunk if inputs.local_key is not None else 1, inputs.key.shape[2]
    positions = torch.arange(tokens, device=gradient.device)
    if inputs.length is None:
        return gradient + leaving[..., None] * (positions < tokens - tokens % chunk)
    length = inputs.length.to(gradient.device)[:, None]
    return gradient + leaving[..., None] * (positions < length - length % chunk)[:, None]
