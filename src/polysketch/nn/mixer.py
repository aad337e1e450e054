"""What a block asks of the layer that carries information from token to token."""

from typing import Any

import torch
from torch import Tensor, nn

from polysketch.attention import SpanState
from polysketch.nn.rope import Rotation
from polysketch.ops import PackedDocuments


class TokenMixer(nn.Module):
    """A layer (batch, length, hidden_size) -> the same that mixes tokens: attention, or what stands in its place.

    As for mechanisms: nothing at or before a token depends on a later one, and `forward` on a sequence equals `extend`
    over any split of it.
    """

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Initialise; the standard deviation of what is added to the residual stream is times `residual_scale`."""
        raise NotImplementedError(f"{type(self).__name__} has no reset_parameters")

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        *,
        causal: bool = True,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | PackedDocuments | None = None,
    ) -> Tensor:
        """Mix a whole sequence.

        Args:
            hidden: (batch, length, hidden_size).
            rotation: of the tokens' positions; no rotary positions when None. With `cu_seqlens` of the positions from 0
                to the end of the longest document.
            causal: a token sees itself and earlier tokens only.
            block_size: causal between blocks of so many tokens, and not inside them; None for 1.
            key_mask: (batch, length) bool, True for a real token.
            cu_seqlens: (documents + 1,) int32 offsets of documents that stand in one row (`ops.PackedDocuments`): each
                is a sequence by itself, and gives what it gives alone.

        Returns:
            (batch, length, hidden_size).
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The state before the first token, with `.position`, `.nbytes`, `.clone()` and `.reorder(indices)`."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def extend(
        self,
        hidden: Tensor,
        state: Any,
        rotation: Rotation | None = None,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Mix new tokens with all tokens so far: arguments as for `forward`, and a state, which is updated in place.

        With a `block_size` the new tokens are whole blocks, the last one of a sequence perhaps short.
        """
        raise NotImplementedError(f"{type(self).__name__} has no extend")

    def init_span(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SpanState:
        """The state before the first span of a sequence, of a size that does not depend on the sequence.

        Raises:
            NotImplementedError: a layer whose mechanism has no such state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state to pass from one span to the next")

    def forward_span(
        self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None
    ) -> tuple[Tensor, SpanState]:
        """Mix a later part of a sequence, causally, given the state of the part before it; gradients pass to both.

        Args:
            hidden: (batch, tokens of the span, hidden_size).
            state: from `init_span` or of the span before.
            rotation: of the positions of these tokens.

        Returns:
            What `forward` of the whole gives in these places, and the state after them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state to pass from one span to the next")

    def alike_position(self, position: int) -> int:
        """A position at which `forward_span` does with a state what it does with that state at `position`.

        Sequences may be at unlike places, and yet be rows of one batch, where this is the same for them.
        """
        return position

    def adds_up(self, position: int) -> bool:
        """Whether `span_sums` of all earlier spans give the state before one that begins at `position`."""
        return False

    @property
    def halo(self) -> int:
        """How many tokens, the last ones before a span, `halo_tensors` is of."""
        return 0

    def halo_tensors(self, hidden: Tensor) -> dict[str, Tensor]:
        """The part of a span's state that is of the last `halo` tokens before it, from the layer's input there."""
        return {}

    def span_sums(self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None) -> dict[str, Tensor]:
        """What a span alone adds to the other tensors of a state, where it `adds_up`.

        Args:
            hidden, rotation: as for `forward_span`.
            state: with the tensors of the halo; no other is read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state that adds up")

    def why_not_captured(self, state: Any) -> str | None:
        """Why a device's graph that captured `extend` by one token would not serve every token; None where it would.

        Args:
            state: from `init_state`; where the answer is None, with a `reset_()` to before the first token.
        """
        return f"{type(self).__name__} decides in host memory at every step"
