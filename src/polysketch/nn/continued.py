"""Documents side by side in rows, some of which began in an earlier row or go on in a later one."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.attention import SpanState
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.rope import Rotation
from polysketch.ops import PackedDocuments


class DocumentPart(NamedTuple):
    """The tokens of one document in one row, where the document stands in another row too.

    Attributes:
        row: number of the row.
        tokens: how many.
        position: tokens of the document in the rows before.
        goes_on: whether there are more in the next row.
    """

    row: int
    tokens: int
    position: int
    goes_on: bool


class ContinuedDocuments:
    """Rows one after the other, and in them documents, of which the first and the last of a row may be parts.

    A part is attended to as a span of its document, with the state that the span before it left. All other documents
    are whole, and are attended to together (`PackedDocuments`).

    Args:
        cu_seqlens: (documents + 1,) int32, where each document, or part of one, begins, and the end of the last. One
            begins where a row does.
        rows: how many, of equal length.
        positions: of each row, the tokens that its first document has in the rows before.
        goes_on: of each row, whether its last document goes on in the next.

    Raises:
        TypeError, ValueError: as `PackedDocuments`; a row in which no document begins, or another number of them.

    Attributes:
        parts: in their order.
        others: the whole documents, in a row without the parts; None where there are none.
        total: tokens of all rows.
    """

    def __init__(self, cu_seqlens: Tensor, rows: int, *, positions: Sequence[int], goes_on: Sequence[bool]) -> None:
        lengths = PackedDocuments(cu_seqlens).lengths
        self.total = sum(lengths)
        if not len(positions) == len(goes_on) == rows:
            raise ValueError(f"expected {rows} positions and ends, got {len(positions)} and {len(goes_on)}")
        self._starts = _documents_before(lengths, rows)
        self._offsets = [0] * len(lengths)
        found: dict[int, DocumentPart] = {}
        for row, (first, after) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            self._offsets[first] = positions[row]
            if positions[row]:
                found[first] = DocumentPart(row, lengths[first], positions[row], False)
            if goes_on[row]:
                found[after - 1] = DocumentPart(row, lengths[after - 1], self._offsets[after - 1], True)
        self._lengths = lengths
        self.parts = tuple(found[number] for number in sorted(found))
        whole = [length for number, length in enumerate(lengths) if number not in found]
        self.others = PackedDocuments(_offsets(whole)) if whole else None
        runs = groupby(range(len(lengths)), key=lambda number: number if number in found else None)
        self._pieces = [(key is not None, sum(lengths[each] for each in run)) for key, run in runs]

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """(total,) int64: the place of each token in its document, from 0, rows before included."""
        lengths, before = torch.tensor(self._lengths, device="cpu"), torch.tensor(self._offsets, device="cpu")
        starts = lengths.cumsum(0) - lengths - before
        return (torch.arange(self.total, device="cpu") - starts.repeat_interleave(lengths)).to(device or "cpu")

    def check_row(self, x: Tensor) -> None:
        """Refuse what is not (1, total, ...).

        Raises:
            ValueError: more rows than 1, or another number of tokens.
        """
        if x.shape[:2] != (1, self.total):
            raise ValueError(f"expected one row of {self.total} tokens, got {tuple(x.shape[:2])}")

    def split(self, x: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """(1, total, width) -> the whole documents (1, their tokens, width), None where there are none, and the parts.

        Raises:
            ValueError: as `check_row`.
        """
        self.check_row(x)
        pieces = x.split([length for _, length in self._pieces], 1)
        parts = [piece for piece, (is_part, _) in zip(pieces, self._pieces, strict=True) if is_part]
        whole = [piece for piece, (is_part, _) in zip(pieces, self._pieces, strict=True) if not is_part]
        return (torch.cat(whole, 1) if whole else None), parts

    def join(self, others: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        lengths = [length for is_part, length in self._pieces if not is_part]
        whole = iter(() if others is None else others.split(lengths, 1))
        each = iter(parts)
        return torch.cat([next(each) if is_part else next(whole) for is_part, _ in self._pieces], 1)


def mix_parts(
    mixer: TokenMixer,
    documents: ContinuedDocuments,
    hidden: Sequence[Tensor],
    states: Sequence[SpanState | None],
    rotations: Sequence[Rotation | None],
) -> tuple[list[Tensor], list[SpanState]]:
    """Mix the tokens of each part of a document with all of the document before it: as few batches as there can be.

    Args:
        mixer: what mixes them.
        documents: whose parts they are.
        hidden: of each part (1, its tokens, hidden_size).
        states: before each part, a batch of one; None where the document begins.
        rotations: of the positions of each part, (its tokens, head_dim / 2); None for none.

    Returns:
        Of each part what `hidden` was, and the state after it, through which no gradient passes.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for number, part in enumerate(documents.parts):
        alike.setdefault((part.tokens, mixer.alike_position(part.position)), []).append(number)
    outputs: dict[int, Tensor] = {}
    after: dict[int, SpanState] = {}
    for (_, position), numbers in alike.items():
        rows = torch.cat([hidden[number] for number in numbers])
        before = [states[number] or mixer.init_span(1, rows.device, _dtype(mixer)) for number in numbers]
        output, state = mixer.forward_span(
            rows, _stacked(before, position), _stacked_rotation([rotations[number] for number in numbers])
        )
        for row, number in enumerate(numbers):
            part = documents.parts[number]
            outputs[number] = output[row : row + 1]
            own = {name: tensor[row : row + 1].detach() for name, tensor in state.tensors.items()}
            after[number] = SpanState(part.position + part.tokens, own)
    every = range(len(documents.parts))
    return [outputs[number] for number in every], [after[number] for number in every]


def _dtype(mixer: TokenMixer) -> torch.dtype:
    return next(mixer.parameters()).dtype


def _stacked(states: Sequence[SpanState], position: int) -> SpanState:
    names = states[0].tensors
    return SpanState(position, {name: torch.cat([state.tensors[name] for state in states]) for name in names})


def _stacked_rotation(rotations: Sequence[Rotation | None]) -> Rotation | None:
    given = [rotation for rotation in rotations if rotation is not None]
    if not given:
        return None
    return Rotation(*(torch.stack(each)[:, None] for each in zip(*given, strict=True)))


def _documents_before(lengths: Sequence[int], rows: int) -> list[int]:
    """How many documents begin before each row, and in all."""
    numbers = {0: 0}
    place = 0
    for number, length in enumerate(lengths):
        place += length
        numbers[place] = number + 1
    size, left = divmod(place, rows)
    starts = [numbers.get(row * size) for row in range(rows + 1)]
    if left or None in starts:
        raise ValueError(f"expected a document to begin with each of {rows} equal rows of {place} tokens")
    return [start for start in starts if start is not None]


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
