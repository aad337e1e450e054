"""What travels through a call of `linear_attention`: its local part, inputs, plan, outputs and result."""

from typing import NamedTuple

from torch import Tensor

from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.linear.state import LinearAttentionState, state_dtype


class LocalPolynomial(NamedTuple):
    """The exact part: tokens of the same aligned chunk weigh (query . key)^degree instead of the sketched weight.

    Attributes:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim).
        degree: even, at least 2.
        chunk: tokens of a chunk; chunks are aligned to multiples of it, counted from each row's first real token.
    """

    query: Tensor
    key: Tensor
    degree: int = 4
    chunk: int = 1024


class LinearAttentionResult(NamedTuple):
    """What `linear_attention` returns.

    Attributes:
        output: (batch, heads, length, value_dim), dtype of the value.
        state: the state after the last token, or None where it was not asked for.
        denominator: (batch, heads, length), float32 or better: offset + sum of weights, by which the output was divided
            if the call normalizes. Zero at padding wherever the output is.
    """

    output: Tensor
    state: LinearAttentionState | None
    denominator: Tensor


class Diagonal:
    """Which weights inside a chunk count: names of a number, which is what operators and programs take.

    A larger number is that of the tokens of a block: they see one another, and all tokens before their block.
    """

    FULL = -1
    NONE = 0
    CAUSAL = 1


class Plan(NamedTuple):
    """Everything about a call that is not a tensor.

    Attributes:
        power, factors, causal, offset, normalize: as in `linear_attention`.
        degree: of the exact weights; means nothing without a local part.
        chunk: tokens of a chunk: of the local part if there is one, else those worked on at once (0: not decided yet).
        diagonal: of `Diagonal`, which weights inside a chunk count; causal calls only. Blocks longer than a chunk are
            cut up by `blocks.run_in_blocks`, but for local chunks in backends that take long blocks.
        return_sums: whether the sums after the last token are wanted.
    """

    power: int
    factors: int
    causal: bool
    offset: float
    normalize: bool
    degree: int
    chunk: int
    diagonal: int
    return_sums: bool


class Inputs(NamedTuple):
    """Tensors of a call.

    Attributes:
        query, key, value, log_decay: as in `linear_attention`, `query` and `key` being features.
        local_query, local_key: of the local part, both or none.
        sums, normalizer: of a state, what was folded before the first token; both or none.
        length: (batch,) int64, tokens of each row of *aligned* inputs; None where all rows are full.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    local_query: Tensor | None = None
    local_key: Tensor | None = None
    log_decay: Tensor | None = None
    sums: Tensor | None = None
    normalizer: Tensor | None = None
    length: Tensor | None = None

    def differentiable(self) -> dict[str, Tensor]:
        """Name -> tensor, of those that are given and have a gradient."""
        return {name: x for name, x in self._asdict().items() if x is not None and name != "length"}


class Outputs(NamedTuple):
    """What a backend gives for aligned inputs.

    Attributes:
        output: (batch, heads, length, value_dim).
        denominator: (batch, heads, length), the offset included.
        sums, normalizer: of the folded tokens, in the layout of a state; of no size where they are not asked for.
    """

    output: Tensor
    denominator: Tensor
    sums: Tensor
    normalizer: Tensor

    @classmethod
    def empty(cls, inputs: Inputs, plan: Plan) -> "Outputs":
        """Uninitialised outputs of a call."""
        (batch, heads, length, _), value = inputs.query.shape, inputs.value
        key_heads, feature_dim = inputs.key.shape[1], inputs.key.shape[3]
        expanded = expanded_size(feature_dim, plan.power, plan.factors) if plan.return_sums else 0
        dtype = state_dtype(value.dtype)
        return cls(
            value.new_empty(batch, heads, length, value.shape[3]),
            value.new_empty(batch, heads, length, dtype=dtype),
            value.new_empty(batch, key_heads, expanded, value.shape[3], dtype=dtype),
            value.new_empty(batch, key_heads, expanded, dtype=dtype),
        )


class Stretch(NamedTuple):
    """Tokens `start`..`stop` of an aligned sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def within(self, outer: "Stretch") -> slice:
        """Where these tokens stand among those of `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)
