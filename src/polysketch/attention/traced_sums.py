"""Sums over features for a tracer: no decision in host memory, no operator of ours, the position a tensor.

Within a span all pairs of tokens are looked at, so the cost is quadratic in its length, not in that of the sequence.

Shape legend: (batch, heads, length, width), e expanded features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.attention.span_state import Following
from polysketch.ops.linear.packing import expand
from polysketch.ops.local_softmax import RemainingSums
from polysketch.ops.mass import is_none


class Recurrence:
    """Causal sums over a span from sums before it, in plain PyTorch; a subclass may ask another library.

    Queries are those of as many heads as keys, or of a multiple of them (grouped queries).
    """

    def add(
        self, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, log_decay: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """S_i = exp(g_i) S_{i-1} + k_i v_i^T, o_i = S_i^T q_i.

        Args:
            query: (batch, query heads, length, e).
            key: (batch, heads, length, e).
            value: (batch, heads, length, value_dim).
            sums: (batch, heads, e, value_dim), S before the span.
            log_decay: (batch, heads, length), g; zeros when None.

        Returns:
            (batch, query heads, length, value_dim), and S after the span.
        """
        if log_decay is None:
            weights = (grouped(query, key) @ key.mT[:, :, None]).tril()
            output = weights @ value[:, :, None] + grouped(query, key) @ sums[:, :, None]
            return output.flatten(1, 2), sums + key.mT @ value
        since = log_decay.cumsum(-1)
        left = (since[..., -1:] - since).exp()[..., None]
        weights = grouped(query, key) @ key.mT[:, :, None] * _decays(since)[:, :, None]
        old = grouped(query, key) * since.exp()[:, :, None, :, None]
        output = weights @ value[:, :, None] + old @ sums[:, :, None]
        return output.flatten(1, 2), sums * since[..., -1:, None].exp() + (key * left).mT @ value

    def correct(
        self, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, strength: Tensor
    ) -> tuple[Tensor, Tensor]:
        """S_i = S_{i-1} + s_i k_i (v_i - S_{i-1}^T k_i)^T, o_i = S_i^T q_i: the delta rule.

        Args:
            query, key, value, sums: as for `add`.
            strength: (batch, heads, length), s.

        Returns:
            As `add`.
        """
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # only who traces pays for it

        errors = value - key @ sums
        if not statically_known_true(
            key.shape[2] == 1
        ):  # a graph of one token needs no solver: some runtimes have none
            identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
            system = (key @ key.mT * strength[:, :, None]).tril(-1) + identity
            errors = torch.linalg.solve_triangular(system, errors, upper=False, unitriangular=True)
        return self.add(query, key, errors * strength[..., None], sums)


class TracedSums(Following):
    """Sums over all tokens before a span.

    Args:
        tensors: `sums`, and `normalizer` where `attend` is called, of a span's state.
        recurrence: what computes.
        power, factors: of the features.
    """

    def __init__(self, tensors: dict[str, Tensor], recurrence: Recurrence, *, power: int, factors: int) -> None:
        self._tensors, self._recurrence, self._kind = tensors, recurrence, (power, factors)
        self._after: dict[str, Tensor] = {}

    def attend(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, **options: Any
    ) -> ops.LinearAttentionResult:
        """As `Following.attend`; the state of the result is none."""
        query, key = self._expanded(query_features, key_features)
        log_decay = options.get("log_decay")
        output, self._after["sums"] = self._recurrence.add(query, key, value, self._tensors["sums"], log_decay)
        ones, mass = torch.ones_like(value[..., :1]), self._tensors["normalizer"][..., None]
        found, mass = self._recurrence.add(query, key, ones, mass, log_decay)
        self._after["normalizer"] = mass[..., 0]
        return _result(output, found, options)

    def recall(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, strength: Tensor, *, factors: int
    ) -> Tensor:
        """As `Following.recall`."""
        query, key = self._expanded(query_features, key_features)
        found, self._after["sums"] = self._recurrence.correct(query, key, value, self._tensors["sums"], strength)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Those that the span has changed: others are never read."""
        return self._after

    def _expanded(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return expand(query, *self._kind, query=True), expand(key, *self._kind, query=False)


class TracedChunks(Following):
    """Sums over all chunks before that of a token, in which weights are exact powers.

    The sums over the open chunk wait beside the others, and join them when it is full: nothing is added up later.

    Args:
        tensors: `sums` and `pending` (batch, heads, e, value_dim + 1), the last column of a value of one; `open_key`
            and `open_value` (batch, heads, chunk, width), the last tokens, those of the open chunk at the end.
        position: () int64 tensor, tokens before the span.
        power, factors: of the features.
    """

    def __init__(self, tensors: dict[str, Tensor], position: Tensor, *, power: int, factors: int) -> None:
        self._tensors, self._kind = tensors, (power, factors)
        self._chunk = tensors["open_key"].shape[2]
        self._fill = position % self._chunk
        self._after: dict[str, Tensor] = {}

    def attend(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, **options: Any
    ) -> ops.LinearAttentionResult:
        """As `Following.attend`, of a call with a `local` part; the state of the result is none."""
        query, key = expand(query_features, *self._kind, query=True), expand(key_features, *self._kind, query=False)
        with_ones = F.pad(value, (0, 1), value=1.0)
        found = self._far(query, key, with_ones, options.get("log_decay")) + self._near(value, options["local"])
        return _result(found[..., :-1], found[..., -1:], options)

    def softmax_in_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, remaining: RemainingSums, *, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """As `Following.softmax_in_chunks`."""
        keys, values, seen = self._opened(query, key, value)
        logits = (grouped(query, keys) @ keys.mT[:, :, None]).masked_fill(~seen, float("-inf"))
        total = remaining.sums[..., -1:]
        empty = total <= 0
        total = total.masked_fill(empty, 1.0)
        rest = (total.log() + remaining.log_scale[..., None]).masked_fill(empty, float("-inf"))
        weights = torch.cat([logits, grouped(rest, keys)], -1).softmax(-1)
        near = (weights[..., :-1] @ values[:, :, None, :, :-1]).flatten(1, 2)
        share = weights[..., -1:].flatten(1, 2)
        return near + share * remaining.sums[..., :-1] / total, share[..., 0]

    def tensors(self) -> dict[str, Tensor]:
        """Those after the span."""
        return self._after

    def _opened(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the last tokens and the new ones, and which of them (queries, keys) a chunk shows."""
        before = (self._tensors["open_key"], self._tensors["open_value"])
        keys, values = (torch.cat([old, new], 2) for old, new in zip(before, (key, value), strict=True))
        behind, place = places(query, keys)
        seen = (behind >= 0) & (place >= -self._fill) & same_chunk(behind, place, self._fill, self._chunk)
        return keys, values, seen

    def _near(self, value: Tensor, local: ops.LocalPolynomial) -> Tensor:
        """Sums of exact weights times values, last of the weights; the open chunk moves on."""
        keys, values, seen = self._opened(local.query, local.key, value)
        weights = (grouped(local.query, keys) @ keys.mT[:, :, None]).pow(local.degree) * seen
        length = local.key.shape[2]
        self._after |= {"open_key": keys[:, :, length:], "open_value": values[:, :, length:]}
        return torch.cat([weights @ values[:, :, None], weights.sum(-1, keepdim=True)], -1).flatten(1, 2)

    def _far(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor | None) -> Tensor:
        """Sums over earlier chunks; the sums before the span, and the chunk that was open there, decay and move on."""
        length = key.shape[2]
        since = torch.zeros_like(key[..., 0]) if log_decay is None else log_decay.cumsum(-1)
        chunk = (self._fill + torch.arange(length, device=key.device)) // self._chunk
        last = (self._fill + length) // self._chunk
        sums, pending = self._tensors["sums"], self._tensors["pending"]
        old = grouped(query, key) * since.exp()[:, :, None, :, None]
        pairs = grouped(query, key) @ key.mT[:, :, None] * _decays(since)[:, :, None]
        pairs = pairs * (chunk[:, None] > chunk)
        found = old @ sums[:, :, None] + (old * (chunk >= 1)[:, None]) @ pending[:, :, None] + pairs @ value[:, :, None]
        left, key = since[..., -1:, None].exp(), key * (since[..., -1:] - since).exp()[..., None]
        whole, closed = (chunk < last)[:, None], (last >= 1).to(key.dtype)
        self._after["sums"] = (sums + pending * closed) * left + (key * whole).mT @ value
        self._after["pending"] = pending * (1.0 - closed) * left + (key * ~whole).mT @ value
        return found.flatten(1, 2)


def first_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `Mechanism.init_span` as they are for a tracer."""
    unread = ("log_decay", "open_features", "open_log_decay")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unread}
    if "open_key" not in tensors:
        return tensors
    if tensors["open_key"].shape[2] == 0:
        return {name: tensor for name, tensor in tensors.items() if name not in ("open_key", "open_value")}
    sums = torch.cat([tensors["sums"], tensors.pop("normalizer")[..., None]], -1)
    return {**tensors, "sums": sums, "pending": torch.zeros_like(sums)}


def places(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """How far every key is behind every query (queries, keys), and the places of keys (keys,), 0 that of the first
    query: queries are the last of as many tokens as there are keys."""
    length, earlier = query.shape[2], key.shape[2] - query.shape[2]
    own = torch.arange(length, device=query.device)
    place = torch.arange(key.shape[2], device=query.device) - earlier
    return own[:, None] - place, place


def same_chunk(behind: Tensor, place: Tensor, position: Tensor, chunk: int) -> Tensor:
    """(queries, keys) bool: whether both are in one chunk, places as by `places`, the first query's at `position`."""
    of_query, of_key = (behind + place + position) // chunk, (place + position) // chunk
    return of_query == of_key


def grouped(x: Tensor, key: Tensor) -> Tensor:
    """(batch, query heads, ...) -> (batch, heads of keys, queries a head, ...)."""
    return x.unflatten(1, (key.shape[1], -1))


def _decays(since: Tensor) -> Tensor:
    """(batch, heads, queries, keys): exp(since_i - since_j) where j <= i, else 0."""
    gaps = since[..., :, None] - since[..., None, :]
    later = torch.ones_like(gaps, dtype=torch.bool).triu(1)
    return gaps.masked_fill(later, float("-inf")).exp()


def _result(numerator: Tensor, mass: Tensor, options: dict[str, Any]) -> ops.LinearAttentionResult:
    """As the op gives it."""
    mass = mass + options.get("offset", 0.0)
    if options.get("normalize", True):
        none = is_none(mass)
        numerator = torch.where(none, 0.0, numerator / torch.where(none, 1.0, mass))
    return ops.LinearAttentionResult(numerator, None, mass[..., 0])
