"""Several documents in one row, as transformers' collators tell of them: by positions that restart, or by offsets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polysketch.attention import PackedDocuments

OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
LENGTHS = ("max_length_q", "max_length_k")
"""What `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` adds; the lengths follow of the offsets."""


def packed_documents(positions: Tensor | None, options: Mapping[str, Any], row: torch.Size) -> PackedDocuments | None:
    """The documents of a row, from what a collator gave; None where there is but one. Waits for the device.

    Args:
        positions: (rows, length), `position_ids`; None where none are given.
        options: `cu_seq_lens_q` and `cu_seq_lens_k`, (documents + 1,) int32, where they are given.
        row: (rows, length) of the tokens that they are to divide.

    Raises:
        TypeError, ValueError: as for `ops.PackedDocuments` and `documents_of_positions`; offsets of queries and of keys
            that differ, or that are not where positions restart.
    """
    told = [PackedDocuments.of_row(options[name], row) for name in OFFSETS if options.get(name) is not None]
    if positions is not None:
        told.append(documents_of_positions(positions))
    if any(documents.lengths != told[0].lengths for documents in told):
        found = " and ".join(str(list(documents.lengths)) for documents in told)
        raise ValueError(
            f"{' and '.join(OFFSETS)} must be the same, and position_ids must restart where they say: got documents "
            f"of {found} tokens"
        )
    return told[0] if told and len(told[0].lengths) > 1 else None


def documents_of_positions(positions: Tensor) -> PackedDocuments:
    """The documents of a row whose positions (1, length) restart at 0 with each; one where they go on by one.

    Raises:
        ValueError: positions that neither go on by one nor restart at 0, or that restart in one of several rows.
    """
    goes_on = positions.diff(dim=-1) == 1
    if bool(goes_on.all()):
        return PackedDocuments(torch.tensor([0, positions.shape[-1]], dtype=torch.int32))
    starts = positions == 0
    if not bool((starts[:, 1:] | goes_on).all()) or not bool(starts[:, 0].all()):
        raise ValueError(
            "position_ids must go on by one within a document, and restart at 0 with the next, to be understood as "
            "documents packed into one row"
        )
    if positions.shape[0] != 1:
        raise ValueError(
            f"position_ids restart, as in packed sequences, in {positions.shape[0]} rows: documents are packed into a "
            "single row; join the rows, as DataCollatorWithFlattening does"
        )
    edges = [*starts[0].nonzero()[:, 0].tolist(), positions.shape[1]]
    return PackedDocuments(torch.tensor(edges, dtype=torch.int32))


def positions_of_documents(ids: Tensor, end_of_text: int) -> Tensor:
    """(rows, length) int64: the place of each token in its document, which `end_of_text` ends; a row begins another."""
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.nn.functional.pad(ids[:, :-1] == end_of_text, (1, 0), value=True)
    return places - places.masked_fill(~begins, 0).cummax(1).values
