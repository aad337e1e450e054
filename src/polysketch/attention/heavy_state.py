"""What decoding carries where the last keys of every bucket are attended to exactly: of constant size."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops.heavy import sort_keys
from polysketch.ops.linear.alignment import leading_padding


class Tokens(NamedTuple):
    """What is kept of tokens: key (batch, key_heads, tokens, head_dim), features, value, and codes without a width.

    Codes are int64 buckets, below zero where there is no token, or a masked one.
    """

    key: Tensor
    features: Tensor
    value: Tensor
    codes: Tensor


class Span(NamedTuple):
    """Where new tokens stand in the list of remembered ones, open chunk, and new ones.

    Attributes:
        before: (batch, length) int64, index in the list of the first token of each new token's chunk; 0 at padding.
        closed: (batch, 1) int64, index of the first token of the chunk that is open after them.
        slots: (batch, chunk + length) int64, place in that chunk of the open and the new ones; below zero for others.
    """

    before: Tensor
    closed: Tensor
    slots: Tensor


@dataclass
class HeavyState:
    """The state of attention over features, and for each bucket the last keys of it before the open chunk.

    Attributes:
        attention: sums and the open chunk; its values have a last column of ones.
        key: (batch, key_heads, buckets, size, head_dim), later ones last; unused places are zero.
        features: (batch, key_heads, buckets, size, r).
        value: (batch, key_heads, buckets, size, value_dim + 1), the last column of ones.
        filled: (batch, key_heads, buckets, size) bool.
        open_codes: (batch, key_heads, chunk) int64 buckets of the open chunk's tokens; -1 where unused or masked.
    """

    attention: ops.LinearAttentionState
    key: Tensor
    features: Tensor
    value: Tensor
    filled: Tensor
    open_codes: Tensor

    @classmethod
    def init(cls, attention: ops.LinearAttentionState, buckets: int, size: int) -> "HeavyState":
        """Nothing remembered, for sums that are empty."""
        lead = (*attention.open_key.shape[:2], buckets, size)

        def room(like: Tensor) -> Tensor:
            return like.new_zeros(*lead, like.shape[3])

        return cls(
            attention,
            room(attention.open_key),
            room(attention.open_features),
            room(attention.open_value),
            filled=attention.sums.new_zeros(lead, dtype=torch.bool),
            open_codes=attention.sums.new_full(attention.open_key.shape[:3], -1, dtype=torch.int64),
        )

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one."""
        return self.attention.position

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the same at every position."""
        return self.attention.nbytes + sum(x.numel() * x.element_size() for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, those of `attention` left out."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "attention"}

    def check(self, value: Tensor, buckets: int, size: int) -> None:
        """Refuse values (batch, key_heads, length, value_dim + 1) of other rows or widths, before anything moves.

        Args:
            value: of the new tokens.
            buckets, size: of the mechanism, which others must not have made the state for.

        Raises:
            ValueError: naming what was expected and what came.
        """
        made_for, wanted = tuple(self.key.shape[1:4]), (value.shape[1], buckets, size)
        if made_for != wanted:
            raise ValueError(
                f"the state was made by a mechanism of other sizes: expected (key heads, buckets, size) {wanted}, "
                f"got {made_for}"
            )
        expected, found = (len(self.key), self.value.shape[4] - 1), (len(value), value.shape[3] - 1)
        if found != expected:
            raise ValueError(f"the state takes (batch size, value width) {expected}, got {found}")

    def clone(self) -> "HeavyState":
        """A copy to roll back to."""
        return HeavyState(self.attention.clone(), **{name: x.clone() for name, x in self.tensors().items()})

    def reorder(self, indices: Tensor) -> "HeavyState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        chosen = {name: x.index_select(0, indices.to(x.device)) for name, x in self.tensors().items()}
        return HeavyState(self.attention.reorder(indices), **chosen)

    def stays_open(self, length: int) -> bool:
        """Whether no row's open chunk is full after this many more tokens."""
        return bool((self.attention.fill + length < self.attention.local_chunk).all())

    def span(self, length: int, key_mask: Tensor | None) -> Span:
        """Where the next `length` tokens stand."""
        device, chunk = self.key.device, self.attention.local_chunk
        seen = self.position.to(device)[:, None]
        padding = torch.zeros_like(seen) if key_mask is None else leading_padding(key_mask)[:, None] * (seen == 0)
        steps, remembered = torch.arange(length, device=device), self.key.shape[2] * self.key.shape[3]
        boundary, position, end = seen - seen % chunk, seen + steps - padding, seen + length - padding

        def index(start: Tensor) -> Tensor:
            behind = remembered + chunk + start - seen + padding
            return torch.where(start <= boundary, remembered, behind)

        slots = torch.cat([boundary + torch.arange(chunk, device=device), position], 1) - (end - end % chunk)
        before = index(position - position % chunk).masked_fill(position < 0, 0)
        return Span(before, index(end - end % chunk), slots)

    def listed(self, new: Tokens) -> Tokens:
        """Remembered tokens, those of the open chunk, and new ones: in each bucket in the order of their positions."""
        buckets = torch.arange(self.key.shape[2], device=self.key.device)[:, None]
        codes = torch.where(self.filled, buckets, -1).flatten(2)
        opened = self.attention
        return Tokens(
            torch.cat([self.key.flatten(2, 3), opened.open_key, new.key], 2),
            torch.cat([self.features.flatten(2, 3), opened.open_features, new.features], 2),
            torch.cat([self.value.flatten(2, 3), opened.open_value, new.value], 2),
            torch.cat([codes, self.open_codes, new.codes], 2),
        )

    def remember_(self, tokens: Tokens, span: Span) -> None:
        """Keep the last ones of each bucket before the chunk that is open now, and the codes of those in it.

        Args:
            tokens: of `listed`.
            span: of the new ones among them, from before they came.
        """
        batch, key_heads, buckets, size = self.filled.shape
        keys = sort_keys(tokens.codes.flatten(0, 1))
        bucket = torch.arange(buckets, device=self.key.device).expand(batch * key_heads, -1)
        lower, upper = keys.before(bucket, span.closed.repeat_interleave(key_heads, 0), size)
        rank = upper[..., None] - size + torch.arange(size, device=self.key.device)
        filled = rank >= lower[..., None]
        index = keys.order.gather(1, rank.clamp(min=0).flatten(1)).view(batch, key_heads, buckets * size, 1)
        self.filled.copy_(filled.view_as(self.filled))
        for mine, theirs in zip((self.key, self.features, self.value), tokens[:3], strict=True):
            chosen = theirs.gather(2, index.expand(-1, -1, -1, theirs.shape[3])).view_as(mine)
            mine.copy_(chosen.masked_fill_(~self.filled[..., None], 0.0))
        self._reopen_(tokens.codes[:, :, buckets * size :], span.slots)

    def _reopen_(self, codes: Tensor, slots: Tensor) -> None:
        """Write codes (batch, key_heads, chunk + length) into the slots of the open chunk."""
        chunk = self.open_codes.shape[2]
        place = torch.where((slots[:, None] >= 0) & (codes >= 0), slots[:, None], chunk)
        wide = codes.new_full((*codes.shape[:2], chunk + 1), -1).scatter_(2, place, codes)
        self.open_codes.copy_(wide[..., :chunk])

    def open_(self, codes: Tensor) -> None:
        """Note the codes (batch, key_heads, 1) of one token of every row, whose chunks it does not fill."""
        slot = self.attention.fill.to(codes.device)[:, None, None].expand_as(codes)
        self.open_codes.scatter_(2, slot, codes)

    def correction(self, query: Tensor, features: Tensor, codes: Tensor, degree: int) -> Tensor:
        """`ops.heavy_correction` of one token's queries by what is remembered: every bucket has its keys ready.

        Args:
            query: (batch, heads, 1, head_dim).
            features: (batch, heads, 1, r).
            codes: (batch, heads, 1) int64.
            degree: of the exact weights.

        Returns:
            (batch, heads, 1, value_dim + 1).
        """
        batch, key_heads, buckets = self.filled.shape[:3]
        lead = torch.arange(batch * key_heads, device=codes.device)[:, None]
        rows = (codes.reshape(batch * key_heads, -1) + lead * buckets).flatten()
        keys, key_features, value, filled = (
            x.flatten(0, 2).index_select(0, rows) for x in (self.key, self.features, self.value, self.filled)
        )
        exact = (query.reshape(len(rows), 1, -1) @ keys.mT) ** degree
        sketched = (features.reshape(len(rows), 1, -1) @ key_features.mT).square()
        weights = torch.where(filled[:, None], exact - sketched, 0.0)
        return (weights @ value).view(*query.shape[:3], -1)
