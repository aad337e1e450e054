"""Packed documents in our models of transformers: what a collator gave, taken out of a call's other arguments."""

from typing import Any

import torch
from torch import Tensor

from polysketch.attention import PackedDocuments
from polysketch.integrations.packed_rows import LENGTHS, OFFSETS, packed_documents


def take_documents(
    others: dict[str, Any], shape: torch.Size, attention_mask: Tensor | None, past: int
) -> PackedDocuments | None:
    """The documents that `position_ids` or offsets divide a row into; None where they say nothing.

    Args:
        others: arguments of the call; those that tell of documents are taken out.
        shape: (batch, new) of the new tokens.
        attention_mask: (batch, past + new), as the call has it.
        past: tokens in the cache.

    Raises:
        TypeError, ValueError: what `packed_documents` refuses; documents beside a mask or a cache; positions that are
            neither those of documents nor those that these models count themselves, from each row's first token.
    """
    positions = others.pop("position_ids", None)
    options = {name: others.pop(name, None) for name in (*OFFSETS, *LENGTHS)}
    packs = any(options[name] is not None for name in OFFSETS)
    if not packs and (positions is None or _are_own(positions, shape, attention_mask, past)):
        return None
    if attention_mask is not None or past:
        raise ValueError(
            "position_ids are not those that these models count, from each row's first token: documents packed into a "
            "row take neither an attention_mask nor a cache; leave them out, or leave position_ids out"
        )
    documents = packed_documents(positions, options, shape)
    if documents is not None:
        return PackedDocuments.of_row(documents, shape)  # positions may be of another length
    if positions is not None and not _are_own(positions, shape, None, 0):
        raise ValueError(
            "position_ids must count from 0 in each row, or restart at 0 with each document of a packed row, got "
            f"{positions.flatten()[0]} first; leave them out"
        )
    return None


def _are_own(positions: Tensor, shape: torch.Size, attention_mask: Tensor | None, past: int) -> bool:
    """Whether positions are those that the model counts: of real tokens before each, padding left out."""
    if attention_mask is None:
        expected = torch.arange(past, past + shape[1], device=positions.device)[None]
        return positions.shape[-1] == shape[1] and bool((positions == expected).all())
    real = attention_mask.to(positions.device).bool()
    expected, new = (real.cumsum(1) - 1)[:, past:], real[:, past:]
    return positions.shape[-1] == expected.shape[1] and bool(((positions == expected) | ~new).all())
