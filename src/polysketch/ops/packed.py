"""Several documents in one row: they become rows of batches to attend in, and what comes out is one row again."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PADDED_SHARE = 8  # at most one token of padding for so many tokens


class DocumentGroup(NamedTuple):
    """Documents of similar length, which stand in the rows of one batch.

    Attributes:
        documents: their numbers in the packed row, rising.
        lengths: of each, in tokens.
        length: of the longest: the others are padded to it, on the right.
    """

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    length: int

    @property
    def is_padded(self) -> bool:
        """Whether any row is shorter than the longest."""
        return min(self.lengths) < self.length


class _Places(NamedTuple):
    """Where tokens stand, on one device.

    Attributes:
        tokens: (padded tokens,) int64, the token at each place of all groups; a document's last token where padding is.
        places: (tokens,) int64, the place of each token.
        padding: (padding,) int64, the places that hold no token.
    """

    tokens: Tensor
    places: Tensor
    padding: Tensor


class PackedDocuments:
    """The documents of one row, and how they are laid into batches of similar length.

    Attention must not pass from one document into the next. So documents are attended to as rows of a batch: a few
    batches, each of documents of similar length, padded on the right to its longest. Later tokens change nothing for a
    causal token, so that every causal mechanism gives each document what it gives it alone, states and chunks of tokens
    beginning where the document begins. All that treats tokens one by one is done on the packed row, without padding.

    Documents of one length are one batch without padding, whose rows are views. Otherwise there are as few batches as
    padding of an eighth of the tokens allows, found by merging the cheapest neighbours.

    Make it once for a row and pass it on in place of `cu_seqlens`: reading offsets waits for their device.

    Args:
        cu_seqlens: (documents + 1,) int32, where each document starts, and the end of the last; best in host memory.

    Raises:
        TypeError: no int32 tensor.
        ValueError: another shape, or offsets that do not start at 0 or do not rise: no document is empty.

    Attributes:
        lengths: tokens of each document.
        total: tokens of the row.
        groups: batches of documents.

    Cost: forward and backward copy each token at most once into its batch and once back, without any atomic addition.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        offsets = _checked_offsets(cu_seqlens)
        self.lengths = tuple(end - start for start, end in pairwise(offsets))
        self.total = offsets[-1]
        self.groups = _grouped(self.lengths)
        self._starts = offsets[:-1]
        self._places: dict[torch.device, _Places] = {}

    @classmethod
    def of_row(
        cls, cu_seqlens: "Tensor | PackedDocuments", row: torch.Size, key_mask: Tensor | None = None
    ) -> "PackedDocuments":
        """The documents of a row of tokens, from offsets or as they were made before.

        Args:
            cu_seqlens: offsets, or documents.
            row: (batch, length) of the tokens that they are to divide.
            key_mask: what was given beside them.

        Raises:
            TypeError, ValueError: as for the class; a batch of several rows, offsets that end elsewhere than the row,
                or a mask: a packed row holds real tokens alone.
        """
        if key_mask is not None:
            raise ValueError("cu_seqlens and key_mask exclude each other: a packed row holds real tokens alone")
        documents = cu_seqlens if isinstance(cu_seqlens, PackedDocuments) else cls(cu_seqlens)
        documents._check_row(row)
        return documents

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return self.groups[-1].length

    @property
    def padded_total(self) -> int:
        """Tokens of all batches, padding included."""
        return sum(len(group.documents) * group.length for group in self.groups)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """(total,) int64: the place of each token in its document, from 0."""
        lengths = torch.tensor(self.lengths, device="cpu")
        starts = torch.tensor(self._starts, device="cpu")
        return (torch.arange(self.total, device="cpu") - starts.repeat_interleave(lengths)).to(device or "cpu")

    def last_tokens(self, device: torch.device | str | None = None) -> Tensor:
        """(documents,) int64: where in the row each document's last token stands."""
        return torch.tensor(self.lengths, device="cpu").cumsum(0).sub_(1).to(device or "cpu")

    def masks(self, device: torch.device | str | None = None) -> list[Tensor | None]:
        """(documents, longest document) bool for each group, True for a real token; None where all are."""
        return [_real(group).to(device or "cpu") if group.is_padded else None for group in self.groups]

    def masks_for(
        self, device: torch.device | str | None, *, causal: bool, block_size: int | None
    ) -> list[Tensor | None]:
        """`masks`, or None for all groups: what stands behind a token changes nothing where it is after its block."""
        if causal and block_size in (None, 1):
            return [None] * len(self.groups)
        return self.masks(device)

    def split(self, x: Tensor, dim: int = 1) -> list[Tensor]:
        """Lay a packed row into the batches.

        Args:
            x: (1, ..., total, ...), the tokens in dimension `dim`.
            dim: at least 1.

        Returns:
            For each group (documents, ..., longest document, ...). Padding repeats a document's last token, so that it
            holds numbers like any others; its gradient is dropped, for no token may depend on it.
        """
        self._check_row(torch.Size((x.shape[0], x.shape[dim])))
        tokens = x.movedim(dim, 1).squeeze(0)
        if self._is_a_view:
            (group,) = self.groups
            return [tokens.unflatten(0, (len(group.documents), group.length)).movedim(1, dim)]
        laid = _Lay.apply(tokens, *self._places_on(x.device), True)
        sizes = [len(group.documents) * group.length for group in self.groups]
        parts = zip(laid.split(sizes), self.groups, strict=True)
        return [part.unflatten(0, (-1, group.length)).movedim(1, dim) for part, group in parts]

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The inverse of `split`: padding is dropped, and the packed row is given back."""
        flat = [part.movedim(dim, 1).flatten(0, 1) for part in parts]
        tokens = flat[0] if self._is_a_view else _Collect.apply(torch.cat(flat), *self._places_on(flat[0].device))
        return tokens.unsqueeze(0).movedim(1, dim)

    @property
    def _is_a_view(self) -> bool:
        """Whether the batch is the row, read otherwise."""
        return len(self.groups) == 1 and not self.groups[0].is_padded

    def _check_row(self, row: torch.Size) -> None:
        if row[0] != 1:
            raise ValueError(f"cu_seqlens divide one row: a batch of 1 is expected, got {row[0]} rows")
        if row[1] != self.total:
            raise ValueError(f"cu_seqlens must end at the length of the row, {row[1]}, got {self.total}")

    def _places_on(self, device: torch.device) -> _Places:
        if device not in self._places:
            host = self._places.get(torch.device("cpu")) or self._host_places()
            self._places[device] = _Places(*(x.to(device) for x in host))
        return self._places[device]

    def _host_places(self) -> _Places:
        tokens, real = [], []
        for group in self.groups:
            starts = torch.tensor([self._starts[number] for number in group.documents], device="cpu")[:, None]
            ends = starts + torch.tensor(group.lengths, device="cpu")[:, None]
            tokens.append(torch.minimum(starts + torch.arange(group.length, device="cpu"), ends - 1).flatten())
            real.append(_real(group).flatten())
        token, is_real = torch.cat(tokens), torch.cat(real)
        places = torch.empty(self.total, dtype=torch.int64, device="cpu")
        places[token[is_real]] = is_real.nonzero()[:, 0]
        return _Places(token, places, (~is_real).nonzero()[:, 0])


def by_documents(
    attend: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    cu_seqlens: Tensor | PackedDocuments,
    *,
    causal: bool,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """What an op gives each document of a packed row alone.

    Args:
        attend: takes as many tensors of documents as rows, and `key_mask` (documents, longest) or None; what stands
            behind a token must change nothing for it where `causal` without blocks.
        tensors: (1, heads, length, ...) of one length.
        cu_seqlens: as for the op.
        causal, block_size: of the op; no mask is made where nothing is seen of what stands behind a token.
        key_mask: what the op was given, to be refused.

    Raises:
        TypeError, ValueError: as for `PackedDocuments.of_row`.
    """
    documents = PackedDocuments.of_row(cu_seqlens, torch.Size((tensors[0].shape[0], tensors[0].shape[2])), key_mask)
    parts = zip(*(documents.split(x, 2) for x in tensors), strict=True)
    masks = documents.masks_for(tensors[0].device, causal=causal, block_size=block_size)
    return documents.join([attend(*part, key_mask=mask) for part, mask in zip(parts, masks, strict=True)], 2)


class _Lay(torch.autograd.Function):
    """(tokens, ...) -> (places, ...), padding as `split` has it, or zeros: then it is the transpose of `_Collect`."""

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, places: Tensor, padding: Tensor, repeat: bool) -> Tensor:
        laid = x.index_select(0, tokens)
        return laid if repeat else laid.index_fill_(0, padding, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _keep_places(ctx, inputs[1:4])
        ctx.repeat = inputs[4]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Collect.apply(gradients[0], *ctx.saved_tensors), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Lay.apply(tangents[0], *ctx.saved_tensors, ctx.repeat)


class _Collect(torch.autograd.Function):
    """(places, ...) -> (tokens, ...): every token from its place."""

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, places: Tensor, padding: Tensor) -> Tensor:
        return x.index_select(0, places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _keep_places(ctx, inputs[1:4])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Lay.apply(gradients[0], *ctx.saved_tensors, False), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Collect.apply(tangents[0], *ctx.saved_tensors)


def _keep_places(ctx: Any, places: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*places)
    ctx.save_for_forward(*places)


def _real(group: DocumentGroup) -> Tensor:
    """(documents, longest) bool in host memory."""
    lengths = torch.tensor(group.lengths, device="cpu")
    return torch.arange(group.length, device="cpu") < lengths[:, None]


def _grouped(lengths: Sequence[int]) -> tuple[DocumentGroup, ...]:
    """Few groups with little padding, the longest documents in the last.

    The distinct lengths of n tokens are at most sqrt(2 n), so that looking at all of them for every merge is cheap.
    """
    counts = sorted(Counter(lengths).items())
    spare = sum(lengths) // _PADDED_SHARE
    while len(counts) > 1:
        costs = [count * (longer - length) for (length, count), (longer, _) in pairwise(counts)]
        cheapest = min(range(len(costs)), key=costs.__getitem__)
        spare -= costs[cheapest]
        if spare < 0:
            break
        (_, count), (longer, more) = counts[cheapest : cheapest + 2]
        counts[cheapest : cheapest + 2] = [(longer, count + more)]
    bounds = [length for length, _ in counts]
    members: list[list[int]] = [[] for _ in bounds]
    for number, length in enumerate(lengths):
        members[bisect_left(bounds, length)].append(number)
    return tuple(
        DocumentGroup(tuple(numbers), tuple(lengths[number] for number in numbers), bound)
        for numbers, bound in zip(members, bounds, strict=True)
    )


def _checked_offsets(cu_seqlens: Tensor) -> list[int]:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        found = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor, got {found}; use offsets.to(torch.int32)")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be (documents + 1,), got {tuple(cu_seqlens.shape)}")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}; are these lengths? then give their sums")
    for number, (start, end) in enumerate(pairwise(offsets)):
        if end <= start:
            raise ValueError(
                f"cu_seqlens must rise, for a document holds at least one token; document {number} is from {start} "
                f"to {end}"
            )
    return offsets
