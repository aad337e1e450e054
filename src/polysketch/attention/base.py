"""What every attention mechanism is: a module from query, key and value to an output, with a state for decoding."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polysketch.attention.abilities import mechanisms_that, mechanisms_that_cross
from polysketch.attention.empty import extend_of_nothing, forward_of_nothing, span_of_nothing
from polysketch.attention.heads import Heads
from polysketch.attention.source import KeptSource
from polysketch.attention.span_state import SpanState
from polysketch.ops import PackedDocuments
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.blocks import check_at_boundary

_OF_NOTHING: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "forward": forward_of_nothing,
    "extend": extend_of_nothing,
    "forward_span": span_of_nothing,
}


class Mechanism(Heads):
    """Attention of (query, key, value), without the projections around it.

    A subclass takes `num_heads`, `head_dim` and `num_kv_heads` and its own options as typed constructor arguments,
    and gives `forward`, `init_state` and `extend`. Two promises hold for every causal mechanism, and the contract
    tests check them: nothing at or before a token depends on a later one, and `forward` on a sequence equals
    `extend` over any split of it.

    Args:
        num_heads: query heads.
        head_dim: width of one query or key head.
        num_kv_heads: key and value heads, a divisor of `num_heads` (grouped queries); `num_heads` when None.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below one, or heads that do not divide.

    Attributes:
        is_causal: whether it can be causal at all; one that cannot refuses `causal=True` and has no state.
        is_blockwise: whether it can be causal between blocks of tokens and see both sides inside them;
            `why_not_blocks` says of which sizes.
        is_bidirectional: whether it takes `causal=False`; a decay over the tokens before has no other direction.
        examples: options to test it with, `hidden_size` left out: in a sequence of 37 tokens and heads of 8 each part
            must carry weight, and where `has_prefix`, the prefix a third to two thirds of the mass.
        after_softmax: options, unless others are asked for, in a model that was trained with softmax.
        recalls_by_pairs: whether all its heads start with induction (`SelfAttention`) where other layers have windows:
            its sums tell what followed a token, and to a head that asks for the token itself they tell little.
        estimates_forward: whether `forward` estimates, in long sequences, what `extend` computes exactly.
        sums_dtype: of sums over tokens in new states, see `keep_sums_in`; None for float32 or better.
    """

    is_causal = True
    is_bidirectional = True
    is_blockwise = False
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    after_softmax: ClassVar[Mapping[str, Any]] = {}
    recalls_by_pairs = False
    estimates_forward = False
    sums_dtype: torch.dtype | None = None

    def __init_subclass__(cls, **given: Any) -> None:
        """Let every mechanism, a user's too, give nothing for no rows or no tokens."""
        super().__init_subclass__(**given)
        for name, around in _OF_NOTHING.items():
            if name in cls.__dict__:
                setattr(cls, name, around(cls.__dict__[name]))

    @property
    def is_cross(self) -> bool:
        """Whether queries may be of another sequence than keys: of another length, at places that do not correspond."""
        return self.is_bidirectional

    @property
    def has_prefix(self) -> bool:
        """Whether attention is an exact local part and an approximated rest, whose shares of the mass one can ask."""
        return False

    @property
    def reach(self) -> int | None:
        """How many tokens, the last ones, a causal token sees at most, itself included; None for all of them."""
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Attend over a whole sequence.

        Args:
            query: (batch, num_heads, length, head_dim).
            key: (batch, num_kv_heads, length, head_dim).
            value: (batch, num_kv_heads, length, value_dim).
            causal: token i sees tokens up to and including itself only.
            block_size: causal between blocks of so many tokens, and not inside them: token i sees all of its own block
                and all before it, i // block_size >= j // block_size; None for 1. Blocks count from a row's first real
                token, and the last may be short. What sees both sides inside a block is what sees them with
                `causal=False`.
            key_mask: (batch, length) bool, True for a real token; None when all are real. What stands at other tokens
                reaches neither the output at real ones nor a gradient, be it NaN.
            hidden: (batch, length, hidden_size), the layer's input, for mechanisms that gate on it; else ignored.

        Returns:
            (batch, num_heads, length, value_dim), in the dtype of value. For no rows or no tokens it has no entries,
            and a gradient passes.

        Raises:
            ValueError: a `block_size` without `causal`, or one that the mechanism does not take (`why_not_blocks`).
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def forward_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | PackedDocuments,
        *,
        causal: bool = True,
        block_size: int | None = None,
        hidden: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend within each of several documents that stand one after the other in one row.

        A document gives what it gives alone: it is attended to as a row of a batch of documents of similar length
        (`ops.PackedDocuments`). Positions, chunks and states begin where the document does.

        Args:
            query: (1, num_heads, length, head_dim).
            key: (1, num_kv_heads, length, head_dim).
            value: (1, num_kv_heads, length, value_dim).
            cu_seqlens: (documents + 1,) int32 offsets, from 0 to the length, rising; or the documents made of them.
            causal: token i sees tokens of its document up to and including itself only.
            block_size: as for `forward`; blocks count from the first token of a document.
            hidden: (1, length, hidden_size), as for `forward`.
            unrotated: query and key before rotary positions, for mechanisms that read them (`reads_unrotated`).

        Returns:
            (1, num_heads, length, value_dim), in the dtype of value.

        Raises:
            TypeError, ValueError: as for `ops.PackedDocuments` and `forward`.
        """
        self.check_inputs(query, key, value)
        documents = PackedDocuments.of_row(cu_seqlens, query[:, 0, :, 0].shape)
        given: list[dict[str, Any]] = [{} for _ in documents.groups]
        if hidden is not None and self.reads_hidden:
            given = [{"hidden": part} for part in documents.split(hidden)]
        if unrotated is not None and self.reads_unrotated:
            pairs = zip(*(documents.split(x, 2) for x in unrotated), strict=True)
            given = [{**one, "unrotated": pair} for one, pair in zip(given, pairs, strict=True)]
        parts = zip(*(documents.split(x, 2) for x in (query, key, value)), strict=True)
        masks = documents.masks_for(query.device, causal=causal, block_size=block_size)
        given = [{**self.block_options(block_size), **own} for own in given]
        every = zip(parts, masks, given, strict=True)
        return documents.join([self(*part, causal=causal, key_mask=mask, **own) for part, mask, own in every], 2)

    def why_not_blocks(self, block_size: int) -> str | None:
        """Why it cannot attend causally between blocks of so many tokens; None where it can.

        A subclass that can for some sizes says here which; one of which `is_blockwise` holds for no size.
        """
        if self.is_blockwise:
            return None
        able = ", ".join(mechanisms_that("is_blockwise"))
        return f"{type(self).__name__} cannot see both sides inside blocks of tokens; mechanisms that can: {able}"

    def block_options(self, block_size: int | None) -> dict[str, Any]:
        """The option of an op for blocks of tokens: none for None.

        Raises:
            TypeError, ValueError: no size of a block, or one that `why_not_blocks` names.
        """
        if block_size is None:
            return {}
        check_at_least_one(block_size=block_size)
        reason = self.why_not_blocks(block_size)
        if reason is not None:
            raise ValueError(reason)
        return {"block_size": block_size}

    def _blocks_after(self, state: Any, block_size: int | None) -> dict[str, Any]:
        """`block_options` of tokens that follow a state, which must stand between two blocks."""
        blocks = self.block_options(block_size)
        if block_size is not None:
            check_at_boundary(state.position, block_size)
        return blocks

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> Any:
        """The state before the first token, with `.position`, `.nbytes`, `.clone()` and `.reorder(indices)`.

        Args:
            batch_size: rows.
            device: where its tensors live; where None, that of the mechanism's tensors or of the first keys.
            dtype: of its tensors; where None, as for `device`; of `linear`, which has no tensors, PyTorch's default
                dtype. Sums are float32 at least.
            value_dim: width of the values to come; head_dim when None. A store of keys and values takes any.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot decode token by token: it has no state")

    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Any,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Attend causally from any number of new tokens to all tokens so far; no gradient.

        Args:
            query, key, value, hidden: the new tokens, shaped as for `forward`.
            state: from `init_state` or an earlier call; updated in place.
            block_size: as for `forward`; the new tokens are whole blocks, the last one of a sequence perhaps short.
                A block that may still change is tried on a `clone` of the state.
            key_mask: (batch, new tokens) bool, True for a real token.

        Returns:
            The output for the new tokens, and the same state.

        Raises:
            ValueError: as for `forward`, or a state that stands inside a block.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot decode token by token: it has no state")

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """The state before the first span of a sequence, of a size that does not depend on the sequence.

        Args:
            batch_size, value_dim: as for `init_state`.
            device, dtype: the same, but that of the mechanism's tensors where None; without any, PyTorch's default.

        Raises:
            NotImplementedError: a mechanism that needs all tokens before a span, not a state of constant size.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no state of constant size to pass from one span of a sequence to the next: give"
            " it whole sequences, or take a mechanism that has one"
        )

    def forward_span(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: SpanState,
        *,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, SpanState]:
        """`forward`, causal, of a later part of a sequence, given the state of the part before it.

        Where `extend` decodes, this trains: gradients pass through the output and through both states, which are
        values. Over the spans of any split of a sequence it gives what `forward` gives of the whole, gradients too.

        Args:
            query, key, value, hidden: of the tokens of the span, shaped as for `forward`; none is padding.
            state: from `init_span` or of the span before.

        Returns:
            The output of the span, and the state after it.

        Raises:
            NotImplementedError: as for `init_span`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no state of constant size to pass from one span of a sequence to the next"
        )

    @torch.no_grad()
    def read_source(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """Read a sequence that the queries of another one will ask, as cross-attention does; no gradient.

        `ask_source` of what this returns is `forward` with `causal=False`, for any number of queries at a time. A
        source is read once. What is kept of it has a constant size in mechanisms on features, and else grows with it.

        Args:
            key: (batch, num_kv_heads, source length, head_dim).
            value: (batch, num_kv_heads, source length, value_dim).
            key_mask: (batch, source length) bool, True for a real token; None when all are real.

        Returns:
            What is kept, with `.nbytes` and `.reorder(indices)`; nothing changes it.

        Raises:
            ValueError: the mechanism needs queries and keys of the same tokens (`is_cross`), or shapes do not fit.
        """
        self.require_cross()
        return KeptSource(*self.real_source(key, value, key_mask), key_mask)

    @torch.no_grad()
    def ask_source(self, query: Tensor, source: Any) -> Tensor:
        """The answers to (batch, num_heads, any length, head_dim) queries, in their dtype.

        Args:
            query: of the sequence that asks.
            source: from `read_source`.
        """
        return self(query, source.key, source.value, causal=False, key_mask=source.key_mask).to(query.dtype)

    def require_cross(self) -> None:
        """Refuse what cannot attend to another sequence.

        Raises:
            ValueError: the mechanism needs queries and keys of the same tokens (`is_cross`); the message lists those
                that do not.
        """
        if not self.is_cross:
            raise ValueError(
                f"{type(self).__name__} needs queries and keys of the same tokens: it cannot attend to another "
                f"sequence; mechanisms that can: {', '.join(mechanisms_that_cross())}"
            )

    def alike_position(self, position: int) -> int:
        """A position at which `forward_span` does with a state what it does with that state at `position`.

        Sequences may be at unlike places, and yet be rows of one batch, where this is the same for them.
        """
        return position

    def adds_up(self, position: int) -> bool:
        """Whether the state before a span that begins at `position` is a sum over the tokens before it.

        It can then be found from what each earlier span gives alone (`span_sums`), all at the same time. Where it is
        not, as by the delta rule, each span waits for the state that the one before leaves.
        """
        return False

    def span_sums(
        self, query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What a span alone adds to the tensors of a state, where it `adds_up`: `add_spans` joins them.

        Args:
            query, key, value, hidden: as for `forward_span`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state that adds up")

    def why_not_captured(self, state: Any) -> str | None:
        """Why a device's graph that captured `extend` by one token would not serve every token; None where it would.

        It does where all that a step does, it does at the same addresses, and no decision is taken in host memory. Such
        a state has a `reset_()` too, back to before the first token.

        Args:
            state: from `init_state`.
        """
        return f"{type(self).__name__} decides in host memory at every step, or its state grows"

    @property
    def is_calibrated(self) -> bool:
        """Whether `calibrate` sets anything."""
        return False

    def calibrate(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> None:
        """Set from a batch what is to be set once, before training; mechanisms without such a thing do nothing.

        Args:
            query, key, key_mask, hidden: as for `forward`, of a batch like those to train on.
        """

    def prefix_share(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """The mean share of the attention mass that approximated weights hold, where `has_prefix`: (num_heads,).

        Raises:
            ValueError: there is no exact part beside an approximated rest.
        """
        raise ValueError(f"{type(self).__name__} has no prefix: it is not an exact local part and an approximated rest")

    def remove_prefix(self) -> None:
        """Give approximated weights no mass from now on, where `has_prefix`: an ablation.

        Raises:
            ValueError: there is no exact part beside an approximated rest.
        """
        raise ValueError(f"{type(self).__name__} has no prefix: it is not an exact local part and an approximated rest")

    def why_not_sums_in(self, dtype: torch.dtype) -> str | None:
        """Why sums over tokens cannot be kept in this half precision; None where they can, or where there are none."""
        return None

    def keep_sums_in(self, dtype: torch.dtype | None) -> None:
        """Make states from now on whose sums over tokens are in this half precision; None for float32 again.

        Every call computes in float32 and rounds them once.

        Raises:
            TypeError: neither bfloat16 nor float16.
            ValueError: `why_not_sums_in` has a reason.
        """
        if dtype not in (None, torch.bfloat16, torch.float16):
            raise TypeError(f"states are kept in torch.bfloat16 or torch.float16, got {dtype}")
        reason = None if dtype is None else self.why_not_sums_in(dtype)
        if reason is not None:
            raise ValueError(reason)
        self.sums_dtype = dtype

    def redraw(self, step: int) -> None:
        """Draw random weights anew, in place, if the mechanism's schedule has it before training step `step` (from 0).

        A trainer calls it before every step. Mechanisms without random weights, or without a schedule, do nothing.
        """


def head_norm(head_dim: int) -> nn.LayerNorm:
    """The layer norm of queries or of keys that polynomial weights are taken of, shared by the heads."""
    return nn.LayerNorm(head_dim, eps=1e-5)


def check_even_degree(degree: int) -> None:
    """Refuse a degree that could give negative weights.

    Raises:
        TypeError: not an integer.
        ValueError: odd, or below two.
    """
    check_at_least_one(degree=degree)
    if degree % 2:
        raise ValueError(f"degree must be even so that no weight is negative, got {degree}")
