"""The loss at every position of documents, each read by itself: as packed training reads them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polysketch.attention import PackedDocuments
from polysketch.data import DocumentLanes, DocumentRows, PackedBatch
from polysketch.data.tokens import Tokens
from polysketch.evaluation.losses import PositionLosses, Sharing, added_up
from polysketch.evaluation.windows import require_known_ids
from polysketch.models import TransformerLM
from polysketch.models.carried import CarriedRows, LayerStates
from polysketch.models.modes import evaluation_mode
from polysketch.targets import NO_TARGET

__all__ = ["sum_document_losses"]


def sum_document_losses(
    model: TransformerLM,
    tokens: Tokens,
    *,
    end_of_text: int,
    context_length: int,
    carry: bool,
    batch_size: int,
    token_bytes: np.ndarray | None,
    device: torch.device,
    sharing: Sharing | None = None,
) -> PositionLosses:
    """The losses of every token of each document but its first, summed by position in the document.

    Args:
        model, tokens, token_bytes, device, sharing: as for `evaluate`.
        end_of_text: the id that ends a document.
        context_length: longer documents are cut into pieces of so many tokens.
        carry: read whole documents in place of pieces, `context_length` tokens at a time, with the state carried along.
            Every process computes all of them.
        batch_size: rows of `context_length` tokens at a time; 1 where states are carried.

    Raises:
        ValueError: ids that are no tokens of the model, or have no number of bytes.
    """
    known = model.config.vocab_size if token_bytes is None else len(token_bytes)
    sums, counts, num_bytes = np.zeros(0), np.zeros(0, dtype=np.int64), 0
    with evaluation_mode(model), torch.inference_mode():
        if carry:
            found = _carried(model, DocumentLanes(tokens, context_length, 1, 0, end_of_text), known, device)
        else:
            rows = DocumentRows(tokens, context_length, 0, end_of_text)
            found = _apart(model, rows, batch_size, known, device, sharing)
        for positions, losses, targets in found:
            size = max(len(sums), int(positions.max()) + 1)
            sums = _longer(sums, size) + np.bincount(positions, losses, size)
            counts = _longer(counts, size) + np.bincount(positions, minlength=size)
            if token_bytes is not None:
                num_bytes += int(token_bytes[targets].sum(dtype=np.int64))
    if sharing is not None and not carry:
        size = min(context_length, len(tokens))
        sums, counts, num_bytes = added_up(sharing, _longer(sums, size), _longer(counts, size), num_bytes)
        used = int(np.flatnonzero(counts)[-1]) + 1
        sums, counts = sums[:used], counts[:used]
    return PositionLosses(sums, counts, None if token_bytes is None else num_bytes)


Found = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Of the tokens that predict another one: positions in their documents, losses in float64, and what they predict."""


def _apart(
    model: TransformerLM,
    rows: DocumentRows,
    batch_size: int,
    known: int,
    device: torch.device,
    sharing: Sharing | None,
) -> Found:
    for index, first in enumerate(range(0, rows.num_rows, batch_size)):
        if sharing is not None and index % sharing.count != sharing.rank:
            continue
        batch = rows.batch(index, batch_size).split(min(batch_size, rows.num_rows - first))[0]
        _require_known(batch, known)
        documents = PackedDocuments(batch.cu_seqlens)
        hidden = model.hidden_states(batch.ids.to(device), cu_seqlens=documents)
        yield _found(model, hidden, batch, documents.positions())


def _carried(model: TransformerLM, lanes: DocumentLanes, known: int, device: torch.device) -> Found:
    states: dict[int, LayerStates] = {}
    for step in range(lanes.num_steps):
        batch = lanes.batch(step, 1)
        _require_known(batch, known)
        rows = CarriedRows.of(batch.cu_seqlens, batch.positions, batch.goes_on, states)
        hidden = model.hidden_states(batch.ids.to(device), carried=rows)
        states = rows.after
        yield _found(model, hidden, batch, rows.documents.positions())


def _require_known(batch: PackedBatch, known: int) -> None:
    require_known_ids(torch.cat([batch.ids.flatten(), batch.targets[batch.targets != NO_TARGET]]), known)


def _found(model: TransformerLM, hidden: Tensor, batch: PackedBatch, positions: Tensor) -> tuple[Any, ...]:
    losses = model.token_losses(hidden, batch.targets.to(hidden.device)).cpu().double()
    real = batch.targets[0] != NO_TARGET
    return positions[real].numpy(), losses[0, real].numpy(), batch.targets[0, real].numpy()


def _longer(x: np.ndarray, size: int) -> np.ndarray:
    return np.pad(x, (0, max(0, size - len(x))))
