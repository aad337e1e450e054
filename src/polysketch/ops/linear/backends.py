"""The table of backends: who computes `linear_attention`, where it runs, and how it cuts a sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch import Tensor

from polysketch.ops.linear import chunked, chunked_backward, native, reference, triton
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.types import Inputs, LinearAttentionResult, Outputs, Plan

Whole = Callable[[Inputs, Plan, Tensor | None, LinearAttentionState | None], LinearAttentionResult]


class ComputeChunk(NamedTuple):
    """Tokens worked on at once where there is no local part.

    Attributes:
        size: of a chunk.
        single: up to so many tokens one chunk holds everything: the quadratic formula, in short rows.
    """

    size: int
    single: int

    def of(self, length: int) -> int:
        """For a sequence of so many tokens."""
        return length if length <= self.single else self.size


_PLAIN = ComputeChunk(256, 1024)


def _runs_anywhere(query: Tensor, value: Tensor | None) -> str | None:
    return None


def _takes_whole_calls(*_: object) -> NoReturn:
    raise NotImplementedError("this backend takes whole calls, not aligned inputs")


@dataclass(frozen=True)
class Backend:
    """One way to compute the op: of aligned inputs, by `forward` and `backward`; or of the whole call, by `whole`.

    Attributes:
        name: by which a caller asks for it.
        why_not: (query, value or None) -> why it cannot take tensors like these, None where it can.
        compute_chunk: tokens worked on at once.
        plain_chunk: the same, causal, for features that stand for themselves (power and factors 1); None for no other.
        forward: aligned inputs -> outputs.
        backward: (inputs, plan, outputs, gradients of the outputs) -> gradients by the names of `Inputs`, of those
            that are given but `log_decay`. Those of query and key in the dtype of sums where there is a `log_decay`:
            its gradient is made of them.
        own_spans: whether both cut a sequence themselves where heads are few.
        long_blocks: whether both take a `diagonal` longer than a chunk, and with it calls in both directions.
        whole: (inputs, plan, key_mask, state) -> result, differentiated by autograd. Inputs are as the caller gave
            them, padded or behind a state.
    """

    name: str
    why_not: Callable[[Tensor, Tensor | None], str | None] = _runs_anywhere
    compute_chunk: ComputeChunk = _PLAIN
    plain_chunk: ComputeChunk | None = None
    forward: Callable[[Inputs, Plan], Outputs] = _takes_whole_calls
    backward: Callable[[Inputs, Plan, Outputs, Outputs], dict[str, Tensor]] = _takes_whole_calls
    own_spans: bool = False
    long_blocks: bool = False
    whole: Whole | None = None

    def chunk_of(self, length: int, plan: Plan) -> int:
        """Tokens of a chunk worked on at once, in a sequence of so many."""
        plain = self.plain_chunk if plan.causal and plan.power == plan.factors == 1 else None
        return (plain or self.compute_chunk).of(length)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", whole=reference.linear_attention),
        Backend("chunked", forward=chunked.forward, backward=chunked_backward.backward),
        Backend(
            "native",
            native.why_not,
            ComputeChunk(128, 512),
            # Scores inside a chunk are as wide as its sums are high: few of them.
            ComputeChunk(32, 32),
            forward=native.forward,
            backward=native.backward,
            long_blocks=True,
        ),
        Backend(
            "triton",
            triton.why_not,
            ComputeChunk(256, 256),
            forward=triton.forward,
            backward=triton.backward,
            own_spans=True,
        ),
    )
}
