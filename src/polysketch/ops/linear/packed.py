"""Linear attention over packed documents: each by itself, all tensors of a call laid into the same batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.types import LinearAttentionResult, LocalPolynomial
from polysketch.ops.packed import PackedDocuments


def packed_attention(
    attend: Callable[..., LinearAttentionResult],
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: Tensor | PackedDocuments,
    *,
    local: LocalPolynomial | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: LinearAttentionState | None,
    return_state: bool,
    **options: Any,
) -> LinearAttentionResult:
    """`linear_attention` of every document; arguments as there, `tensors` its features and values, checked before.

    Raises:
        ValueError: a state is given or asked for, or as for `PackedDocuments.of_row`.
    """
    if state is not None or return_state:
        raise ValueError(
            "documents of cu_seqlens have no states: give documents whose states are wanted as rows of a batch"
        )
    documents = PackedDocuments.of_row(cu_seqlens, torch.Size((tensors[0].shape[0], tensors[0].shape[2])), key_mask)
    given = [documents.split(x, 2) for x in tensors]
    count = len(documents.groups)
    locals_: list[LocalPolynomial | None] = [None] * count
    if local is not None:
        pairs = zip(documents.split(local.query, 2), documents.split(local.key, 2), strict=True)
        locals_ = [LocalPolynomial(query, key, local.degree, local.chunk) for query, key in pairs]
    decays = [None] * count if log_decay is None else documents.split(log_decay, 2)
    device = tensors[0].device
    masks = documents.masks_for(device, causal=options["causal"], block_size=options["block_size"])
    every = zip(*given, locals_, decays, masks, strict=True)
    results = [attend(*rows, local=own, log_decay=decay, key_mask=mask, **options) for *rows, own, decay, mask in every]
    output = documents.join([result.output for result in results], 2)
    return LinearAttentionResult(output, None, documents.join([result.denominator for result in results], 2))
