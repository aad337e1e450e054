"""A model's state between calls, with tokens put off, and a way back for tokens that turn out to be wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polysketch.integrations.huggingface.padding import refuse_right_padding
from polysketch.models import ModelState, TransformerLM
from polysketch.models.tokens import check_ids

_ROLLBACK = 128
"""Tokens of a long row that can be taken back: more than a draft of assisted decoding has."""
_REPLAYED_TOGETHER = 32
"""Up to so many tokens are read again together with the next ones; more are read on their own, and only once."""


@dataclass(frozen=True)
class TokenRows:
    """Some tokens of every row.

    Attributes:
        ids: (batch, length) int64.
        mask: (batch, length) bool, true for a real token; None when all are real.
    """

    ids: Tensor
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.ids.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(x.numel() * x.element_size() for x in (self.ids, self.mask) if x is not None)

    def part(self, start: int, end: int) -> "TokenRows":
        """Tokens `start` to before `end`."""
        return self._map(lambda x: x[:, start:end])

    def rows(self, indices: Tensor) -> "TokenRows":
        """The rows `indices`, repeats allowed."""
        return self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def copied(self) -> "TokenRows":
        """The same in memory of their own."""
        return self._map(torch.clone)

    def followed_by(self, other: "TokenRows") -> "TokenRows":
        """These tokens and then those of `other`."""
        no_mask = self.mask is None and other.mask is None
        mask = None if no_mask else torch.cat([self._full_mask(), other._full_mask()], 1)
        return TokenRows(torch.cat([self.ids, other.ids], 1), mask)

    def _full_mask(self) -> Tensor:
        return torch.ones_like(self.ids, dtype=torch.bool) if self.mask is None else self.mask

    def _map(self, function: Callable[[Tensor], Tensor]) -> "TokenRows":
        return TokenRows(function(self.ids), None if self.mask is None else function(self.mask))


class RewindableState:
    """The state after some tokens, tokens that are still to be read, and, while recording, a state to go back to.

    Attributes:
        state: of the model; None before the first token.
        pending: tokens that count as seen and are read together with the next ones.
        snapshot: while recording, a clone of the state before `recorded`.
        recorded: tokens read since then.
        recording: whether to keep those two.
        in_inference: whether the states were last changed under `torch.inference_mode`.
    """

    def __init__(self) -> None:
        self.state: ModelState | None = None
        self.pending: TokenRows | None = None
        self.snapshot: ModelState | None = None
        self.recorded: TokenRows | None = None
        self.recording = False
        self.in_inference = False

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        parts = (self.state, self.pending, self.snapshot, self.recorded)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def batch_size(self) -> int | None:
        """Rows; None before the first token."""
        if self.state is not None:
            return self.state.position.shape[0]
        return None if self.pending is None else self.pending.ids.shape[0]

    def put_off(self, new: TokenRows) -> None:
        """Read these tokens later."""
        self._check_batch(new)
        self.pending = self._after_pending(new).copied()  # a caller may use its memory again

    def read(self, model: TransformerLM, new: TokenRows) -> Tensor:
        """Read tokens now, after pending ones.

        Args:
            model: whose state this is.
            new: the new tokens.

        Returns:
            (batch, new.length, hidden_size) after the final norm, of the new tokens.

        Raises:
            ValueError: another batch than before, or padding after a row's first token.
        """
        self._check_batch(new)
        check_ids(new.ids, model.config.vocab_size, new.ids.device)  # refused tokens leave all as it is
        self._leave_inference()
        self.state = model.init_state(new.ids.shape[0]) if self.state is None else self.state
        replayed, tokens = self.pending.length if self.pending else 0, self._after_pending(new)
        if tokens.mask is not None:
            refuse_right_padding(tokens.mask, self.state.position > 0)
        self.pending = None
        early = self._read_first(tokens.length, replayed)
        hidden = [_extend(model, tokens.part(0, early), self.state)] if early else []
        if self.recording and self.snapshot is None:
            self.snapshot, self.recorded = self.state.clone(), None
        late = tokens.part(early, tokens.length)
        if self.recording:
            self.recorded = late.copied() if self.recorded is None else self.recorded.followed_by(late)
        return torch.cat([*hidden, _extend(model, late, self.state)], 1)[:, -new.length :]

    def take_back(self, tokens: int) -> None:
        """Forget the last tokens, at least one.

        Raises:
            RuntimeError: none are recorded.
            ValueError: more than were recorded.
        """
        if self.recorded is None:
            raise RuntimeError("no tokens are recorded that could be taken back: call activate_past_recording first")
        kept = self.recorded.length - tokens
        if kept < 0:
            raise ValueError(
                f"expected to take back at most {self.recorded.length} tokens, those since the last snapshot of the "
                f"state, got {tokens}: choose shorter drafts"
            )
        self.state = self.snapshot
        self.pending = self.recorded.part(0, kept) if kept else None

    def forget_snapshot(self) -> None:
        """Forget the snapshot; the next tokens take a new one."""
        self.snapshot = self.recorded = None

    def select(self, indices: Tensor) -> None:
        """Take the rows `indices` (int64), repeats allowed."""
        self.state, self.snapshot = (
            None if state is None else state.reorder(indices) for state in (self.state, self.snapshot)
        )
        self.in_inference = torch.is_inference_mode_enabled()
        self.pending, self.recorded = (
            None if rows is None else rows.rows(indices) for rows in (self.pending, self.recorded)
        )

    def _leave_inference(self) -> None:
        """Tensors made under `torch.inference_mode` may be changed in it alone: outside of it copies are."""
        was, self.in_inference = self.in_inference, torch.is_inference_mode_enabled()
        if was and not self.in_inference:
            self.state, self.snapshot = (
                None if state is None else state.clone() for state in (self.state, self.snapshot)
            )

    def _read_first(self, total: int, replayed: int) -> int:
        """How many of `total` tokens to read before a snapshot: a long replay, and a long prompt but for its end."""
        if not self.recording or self.snapshot is not None:
            return 0
        return max(total - _ROLLBACK, replayed if replayed > _REPLAYED_TOGETHER else 0, 0)

    def _after_pending(self, new: TokenRows) -> TokenRows:
        return new if self.pending is None else self.pending.followed_by(new)

    def _check_batch(self, new: TokenRows) -> None:
        if self.batch_size not in (None, new.ids.shape[0]):
            raise ValueError(
                f"the cache holds {self.batch_size} rows, got ids of shape {tuple(new.ids.shape)}: "
                "give every batch a cache of its own"
            )


def _extend(model: TransformerLM, tokens: TokenRows, state: ModelState) -> Tensor:
    """Read tokens into the state, in place."""
    mask = None if tokens.mask is None or bool(tokens.mask.all()) else tokens.mask
    return model.extend_hidden(tokens.ids, state, key_mask=mask)[0]
