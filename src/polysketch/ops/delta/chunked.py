"""The delta rule chunk by chunk in plain PyTorch: linear time, the sums of one moment; CPU and CUDA.

Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (NeurIPS 2024), section 3.
With S the sums before a chunk, s its strengths and w the weights between its tokens,

    (I + tril(w diag(s), -1)) E = V - E(K) S        S' = S + E(K)^T diag(s) E

The triangular systems of all chunks are inverted at once; what remains for each chunk in turn are three products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear.packing import expand, expanded_size, halves

_CHUNK = 64


def errors(inputs: Inputs, factors: int) -> Tensor:
    """(batch, heads, length, value_dim): each value less what the sums before its token say of it."""
    value, length = inputs.value, inputs.key.shape[2]
    key, rest, strength = (_in_chunks(x) for x in (inputs.key, value, inputs.strength[..., None]))
    inverse = _inverse(key, strength, factors)
    sums = _first(inputs, factors)
    found = []
    for chunk in range(key.shape[2]):
        written = expand(key[:, :, chunk], 1, factors, query=True)
        error = inverse[:, :, chunk] @ (rest[:, :, chunk] - written @ sums)
        sums = sums + written.mT @ (strength[:, :, chunk] * error)
        found.append(error)
    return torch.cat(found, 2)[:, :, :length].contiguous()


def _in_chunks(x: Tensor) -> Tensor:
    """(batch, heads, length, width) -> (batch, heads, chunks, tokens, width), zeros behind the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % _CHUNK)).unflatten(2, (-1, _CHUNK))


def _inverse(key: Tensor, strength: Tensor, factors: int) -> Tensor:
    """(batch, heads, chunks, tokens, tokens): the inverse of every chunk's system."""
    first, *second = (half @ half.mT for half in halves(key, factors))
    weights = first * second[0] if second else first
    identity = torch.eye(key.shape[3], dtype=key.dtype, device=key.device)
    system = identity + (weights * strength.mT).tril(-1)
    return torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)


def _first(inputs: Inputs, factors: int) -> Tensor:
    """The sums before the first token."""
    if inputs.sums is not None:
        return inputs.sums
    key, value = inputs.key, inputs.value
    return value.new_zeros(*key.shape[:2], expanded_size(key.shape[3], 1, factors), value.shape[3])
