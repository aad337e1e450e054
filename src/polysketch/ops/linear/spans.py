"""A sequence in several spans at once: the prefix sums over chunks computed in parallel instead of one by one.

PolySketchFormer, section 3.1, names both ways. In order, a head is one chain of chunks, so one or two heads cannot keep
many cores busy. In spans, each span of chunks first adds up its own keys and values, all at the same time; a scan over
these sums gives what comes before each span; then all spans attend at the same time. The keys are folded twice: about
half as much work again, spread over as many times more workers.
"""

import torch
from torch import Tensor

from polysketch.ops.linear.aligned_op import fold, run
from polysketch.ops.linear.backends import Backend
from polysketch.ops.linear.types import Inputs, Outputs, Plan
from polysketch.ops.parallel import num_workers

_SHORTEST_ON_A_CPU = 4096
"""Tokens of a span at least. Measured with one head on two cores: two spans of 2,048 are slower than one after another
in the backward pass, two of 8,192 take 0.73 of the time forward and 0.78 with the backward pass."""
_SHORTEST_ON_A_DEVICE = 1024
_UNITS_ON_A_DEVICE = 256
"""Pieces of work that keep a GPU busy, two for each multiprocessor; not measured yet, like the length above."""


def run_in_spans(inputs: Inputs, plan: Plan, backend: Backend) -> Outputs:
    """What the backend gives for a causal, aligned sequence, in as many spans as there are workers for."""
    tokens = inputs.key.shape[2]
    count = 1 if backend.own_spans else num_spans(inputs.key, plan.chunk)
    if count == 1:
        return run(inputs, plan, backend)
    # A block stays whole, but for one that is everything: its spans read one another, and leave no state.
    whole = plan.diagonal <= plan.chunk or _is_everything(plan, tokens)
    cut = Cut.of(tokens, count, plan.chunk if whole else plan.diagonal)
    return run(inputs, plan, backend) if cut.count == 1 else _run_together(inputs, plan, backend, cut)


def num_spans(key: Tensor, chunk: int) -> int:
    """How many spans keep every worker busy; 1 where the key heads (batch, key_heads, length, r) already do.

    Args:
        key: key features.
        chunk: tokens of a chunk.
    """
    if torch.compiler.is_compiling() or key.shape[0] == 0:
        return 1
    on_cpu = key.device.type == "cpu"
    workers = num_workers(key.device) if on_cpu else _UNITS_ON_A_DEVICE
    shortest = max(chunk, _SHORTEST_ON_A_CPU if on_cpu else _SHORTEST_ON_A_DEVICE)
    units = max(1, key.shape[0] * key.shape[1])
    return max(1, min(workers // units, key.shape[2] // shortest))


def _is_everything(plan: Plan, tokens: int) -> bool:
    """Whether all tokens are one block of several chunks: attention in both directions."""
    return plan.diagonal > plan.chunk and plan.diagonal >= tokens and not plan.return_sums


def _run_together(inputs: Inputs, plan: Plan, backend: Backend, cut: "Cut") -> Outputs:
    """Spans as rows of one batch, each with the sums of what it reads of the others."""
    tokens = inputs.key.shape[2]
    both = _is_everything(plan, tokens)
    spans = _split(inputs, cut)
    real = spans.length
    folded = real if real is None or spans.local_key is None or both else real - real % plan.chunk
    own = fold(spans._replace(length=folded), plan, backend)
    totals = None if spans.log_decay is None else _total_decay(spans.log_decay, folded)
    sums, normalizer = (
        _before(cut, x, initial, totals) for x, initial in zip(own, (inputs.sums, inputs.normalizer), strict=True)
    )
    if both:
        sums, normalizer = (x + _after(cut, of_span) for x, of_span in zip((sums, normalizer), own, strict=True))
    found = run(spans._replace(sums=sums, normalizer=normalizer), plan, backend)
    return Outputs(
        cut.join(found.output)[:, :, :tokens],
        cut.join(found.denominator)[:, :, :tokens],
        cut.last(found.sums) if plan.return_sums else found.sums,
        cut.last(found.normalizer) if plan.return_sums else found.normalizer,
    )


def _split(inputs: Inputs, cut: "Cut") -> Inputs:
    """Spans as rows of the batch, each with its own real tokens, and no sums yet."""
    given = inputs._replace(sums=None, normalizer=None, log_decay=None).differentiable()
    decay = None if inputs.log_decay is None else cut.split(inputs.log_decay[..., None])[..., 0]
    length = lengths_of_spans(cut, inputs.key.shape[2], inputs.length, inputs.key)
    return Inputs(**{name: cut.split(tensor) for name, tensor in given.items()}, log_decay=decay, length=length)


class Cut:
    """`count` spans of `size` tokens; the last is filled up with zeros."""

    def __init__(self, count: int, size: int, missing: int) -> None:
        self.count, self.size, self.missing = count, size, missing

    @classmethod
    def of(cls, tokens: int, count: int, chunk: int) -> "Cut":
        """At most `count` spans of `tokens`, each of whole chunks."""
        size = -(-tokens // (count * chunk)) * chunk
        count = -(-tokens // size)
        return cls(count, size, count * size - tokens)

    def split(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, width) -> (batch * count, heads, size, width); a view where batch is 1."""
        if self.missing:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.missing))
        return x.unflatten(2, (self.count, self.size)).transpose(1, 2).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """(batch * count, heads, size, ...) -> (batch, heads, count * size, ...)."""
        return x.unflatten(0, (-1, self.count)).transpose(1, 2).flatten(2, 3)

    def last(self, x: Tensor) -> Tensor:
        """(batch * count, ...) -> (batch, ...) of the last spans; a copy, for a view would keep all spans alive."""
        return x.unflatten(0, (-1, self.count))[:, -1].clone()


def lengths_of_spans(cut: Cut, tokens: int, length: Tensor | None, like: Tensor) -> Tensor | None:
    """(batch * count,) real tokens of each span; None where all are full."""
    if length is None and not cut.missing:
        return None
    whole = torch.full((like.shape[0],), tokens, device=like.device) if length is None else length
    starts = torch.arange(0, cut.count * cut.size, cut.size, device=whole.device)
    return (whole[:, None] - starts).clamp(0, cut.size).flatten()


def _total_decay(decay: Tensor, folded: Tensor | None) -> Tensor:
    """(batch * count, heads): log decay of all tokens of a span that are folded."""
    if folded is not None:
        decay = decay * (torch.arange(decay.shape[2], device=decay.device) < folded[:, None, None])
    return decay.sum(-1, dtype=torch.promote_types(decay.dtype, torch.float32))


def _before(cut: Cut, own: Tensor, initial: Tensor | None, totals: Tensor | None) -> Tensor:
    """The sums before each span, from each span's own (batch * count, heads, ...) and those before the first."""
    own = own.unflatten(0, (-1, cut.count))
    first = torch.zeros_like(own[:, :1]) if initial is None else initial[:, None].to(own.dtype)
    parts = torch.cat([first, own[:, :-1]], 1)
    if totals is None:
        return parts.cumsum(1).flatten(0, 1)
    totals = totals.unflatten(0, (-1, cut.count)).to(own.dtype)
    since = torch.cat([torch.zeros_like(totals[:, :1]), totals[:, :-1]], 1).cumsum(1).mT  # (batch, heads, count)
    # Differences, never ratios of exponentials; what is above the diagonal is masked before it could overflow.
    gaps = since[..., :, None] - since[..., None, :]
    factors = torch.ones_like(gaps).tril() * gaps.tril().exp()
    return torch.einsum("bhij,bjh...->bih...", factors, parts).flatten(0, 1)


def _after(cut: Cut, own: Tensor) -> Tensor:
    """The sums after each span, from each span's own (batch * count, heads, ...)."""
    own = own.unflatten(0, (-1, cut.count))
    parts = torch.cat([own[:, 1:], torch.zeros_like(own[:, :1])], 1)
    return parts.flip(1).cumsum(1).flip(1).flatten(0, 1)
