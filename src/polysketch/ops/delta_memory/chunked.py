"""`delta_memory` chunk by chunk in plain PyTorch: linear time; any device and dtype, differentiated by autograd.

With S the memory before a chunk, s its strengths and w the weights between its tokens,

    (I + tril(s w, -1)) U = s (V - S(K))        S' = S + U at K        R = S(Q) + tril(w_qk) U

Autograd keeps what was read of the memory, k^2 value_dim numbers a token and head.
"""

import torch
from torch import Tensor

from polysketch.ops.delta_memory.reference import dense, weights
from polysketch.ops.delta_memory.types import Inputs

_CHUNK = 32


def recall(inputs: Inputs, size: int, sums: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.recall`, and the memory after the last token."""
    value = inputs.value
    if sums is None:
        sums = value.new_zeros(*value.shape[:2], size * size, value.shape[3])
    recalled, written = [], []
    for part in zip(*(x.split(_CHUNK, 2) for x in inputs), strict=True):
        found, new, sums = _chunk(Inputs(*part), size, sums)
        recalled.append(found)
        written.append(new)
    return torch.cat(recalled, 2), torch.cat(written, 2), sums


def _chunk(inputs: Inputs, size: int, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query_cells, query_weights, key_cells, key_weights, value, strength = inputs
    group, strength = query_cells.shape[1] // key_cells.shape[1], strength[..., None]
    cells, by = _products(key_cells, key_weights, size)
    key, query = dense(key_cells, key_weights, size), dense(query_cells, query_weights, size)
    system = torch.eye(value.shape[2], dtype=value.dtype, device=value.device) + (strength * weights(key, key)).tril(-1)
    missing = strength * (value - _read(sums, cells, by))
    written = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    # Query heads of one key head read it as more tokens of that head.
    asked, of = (x.unflatten(1, (-1, group)).flatten(2, 3) for x in _products(query_cells, query_weights, size))
    before = _read(sums, asked, of).unflatten(2, (group, -1)).flatten(1, 2)
    among = weights(query, key.repeat_interleave(group, 1)).tril() @ written.repeat_interleave(group, 1)
    added = (by[..., None] * written[..., None, :]).flatten(2, 3)
    index = cells.flatten(2, 3)[..., None].expand_as(added)
    return before + among, written, sums.scatter_add(2, index, added)


def _products(cells: Tensor, by: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Two sparse vectors (..., 2 k) -> cells int64 and weights (..., k^2) of their product."""
    cells, by = (x.unflatten(-1, (2, -1)) for x in (cells.long(), by))
    both = cells[..., 0, :, None] * size + cells[..., 1, None, :]
    return both.flatten(-2), (by[..., 0, :, None] * by[..., 1, None, :]).flatten(-2)


def _read(sums: Tensor, cells: Tensor, by: Tensor) -> Tensor:
    """(batch, heads, length, value_dim): the rows of `cells` (batch, heads, length, k^2), weighed."""
    flat = cells.flatten(2)[..., None].expand(-1, -1, -1, sums.shape[3])
    rows = sums.gather(2, flat).unflatten(2, cells.shape[2:])
    return (by[..., None, :] @ rows)[..., 0, :]
