"""The windows of tokens that a model is trained on, in an order that needs no state."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from polysketch.data.permutation import KeyedPermutation
from polysketch.data.tokens import Tokens


class TrainingWindows:
    """Windows of ``context_length + 1`` tokens, as a pure function of (seed, global sample index).

    Sample ``index`` belongs to epoch ``index // num_windows``. In an epoch, the tokens from a random offset on are cut
    into windows that overlap by one token, so that each token is predicted once, and a keyed permutation gives their
    order. Nothing is stored and nothing is consumed: resuming needs only the number of the step.

    Attributes:
        context_length: Number of tokens a model sees; a window has one more, the last target.
        num_windows: Windows in an epoch.
    """

    def __init__(self, tokens: Tokens, context_length: int, seed: int) -> None:
        """Keep a reference to the tokens.

        Args:
            tokens: Ids, one-dimensional, of any integer type; usually ``Split.tokens``.
            context_length: At least 1.
            seed: Another seed gives another order and other offsets.

        Raises:
            ValueError: The tokens do not fill one window, or the context length is not positive.
        """
        if context_length < 1:
            raise ValueError(f"expected a context length of at least 1, found {context_length}")
        if len(tokens) < context_length + 1:
            raise ValueError(
                f"expected at least {context_length + 1} tokens for a context length of {context_length}, "
                f"found {len(tokens)}: choose a shorter context or prepare more text"
            )
        self.context_length = context_length
        self.seed = seed
        self._tokens = tokens
        # One window fewer than may fit leaves room for at least context_length offsets, the last of which reaches the
        # last token: over the epochs every token is predicted.
        self.num_windows = max(1, (len(tokens) - context_length) // context_length)
        self._num_offsets = len(tokens) - self.num_windows * context_length

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Position of the first token of each sample, int64, shaped as ``indices`` (global sample indices, >= 0)."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and indices.min() < 0:
            raise ValueError(f"expected sample indices of at least 0, found {indices.min()}")
        epochs, positions = np.divmod(indices, self.num_windows)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            starts[chosen] = self._epoch_starts(int(epoch), positions[chosen])
        return starts

    def window(self, index: int) -> torch.Tensor:
        """Sample ``index`` (a global sample index, at least 0): ids, int64 of shape (context_length + 1,)."""
        return self._read(np.array([index]))[0]

    def batch(self, step: int, batch_size: int) -> torch.Tensor:
        """The samples that a step trains on.

        Args:
            step: Number of the step, from 0.
            batch_size: Samples in a batch, at least 1.

        Returns:
            Ids, int64 of shape (batch_size, context_length + 1).

        Raises:
            ValueError: The batch size is not positive, or the step negative.
        """
        if batch_size < 1:
            raise ValueError(f"expected a batch size of at least 1, found {batch_size}")
        return self._read(step * batch_size + np.arange(batch_size))

    def _epoch_starts(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=16).digest()
        offset = int.from_bytes(digest[:8], "little") % self._num_offsets
        order = KeyedPermutation(self.num_windows, int.from_bytes(digest[8:], "little"))
        return offset + order(positions) * self.context_length

    def _read(self, indices: np.ndarray) -> torch.Tensor:
        positions = self.starts(indices)[:, None] + np.arange(self.context_length + 1)
        return torch.from_numpy(np.asarray(self._tokens[positions]).astype(np.int64))
