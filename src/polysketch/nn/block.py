"""A transformer block: normalise, mix tokens, add; normalise, feed forward, add."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from polysketch.attention import Mechanism, SpanState
from polysketch.nn.continued import ContinuedDocuments, mix_parts
from polysketch.nn.glu import GatedLinearUnit
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.rope import Rotation
from polysketch.nn.self_attention import MechanismInputs, SelfAttention
from polysketch.ops import PackedDocuments


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feedforward(norm(x)).

    Args:
        hidden_size: width of the residual stream.
        mixer: what attends, or mixes tokens in another way.
        feedforward_size: inner width of the gated linear unit; 8/3 of `hidden_size` when None.
        norm_epsilon: of the layer norms, which have scale and bias.
        rotary: whether rotary positions, where they are given, are passed on to the mixer.

    Attributes:
        attention: the mixer, whatever it is: the name that saved weights have.
    """

    def __init__(
        self,
        hidden_size: int,
        mixer: TokenMixer,
        *,
        feedforward_size: int | None = None,
        norm_epsilon: float = 1e-5,
        rotary: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon)
        self.attention = mixer
        self.feedforward_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon)
        self.feedforward = GatedLinearUnit(hidden_size, feedforward_size)
        self.rotary = rotary

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Initialise the projections; outputs added to the residual stream are scaled by `residual_scale`."""
        self.attention.reset_parameters(residual_scale)
        self.feedforward.reset_parameters(residual_scale)

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
        """(batch, length, hidden_size) -> the same; arguments as for `TokenMixer.forward`."""
        normalized = self.attention_norm(hidden)
        blocks = {} if block_size is None else {"block_size": block_size}
        hidden = hidden + self.attention(
            normalized, self._own(rotation), causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, **blocks
        )
        return hidden + self.feedforward(self.feedforward_norm(hidden))

    def extend(
        self,
        hidden: Tensor,
        state: Any,
        rotation: Rotation | None = None,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The block for new tokens that follow those in `state`, which is updated in place."""
        normalized = self.attention_norm(hidden)
        blocks = {} if block_size is None else {"block_size": block_size}
        mixed, state = self.attention.extend(normalized, state, self._own(rotation), key_mask=key_mask, **blocks)
        hidden = hidden + mixed
        return hidden + self.feedforward(self.feedforward_norm(hidden)), state

    def forward_span(
        self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None
    ) -> tuple[Tensor, SpanState]:
        """The block for a later part of a sequence, as `TokenMixer.forward_span`."""
        mixed, state = self.attention.forward_span(self.attention_norm(hidden), state, self._own(rotation))
        hidden = hidden + mixed
        return hidden + self.feedforward(self.feedforward_norm(hidden)), state

    def forward_continued(
        self,
        hidden: Tensor,
        documents: ContinuedDocuments,
        states: Sequence[SpanState | None],
        rotation: Rotation | None = None,
        rotations: Sequence[Rotation | None] = (),
    ) -> tuple[Tensor, list[SpanState]]:
        """The block for rows of documents that go on from row to row.

        Args:
            hidden: (1, tokens of all rows, hidden_size).
            documents: those that stand there.
            states: before each of `documents.parts`; None where a document begins.
            rotation: as for `forward`, of the whole documents.
            rotations: of the positions of each part.

        Returns:
            What `forward` of each document as far as here gives in these places; and the states after the parts,
            through which no gradient passes.

        Raises:
            NotImplementedError: as `TokenMixer.init_span`.
        """
        whole, parts = documents.split(self.attention_norm(hidden))
        mixed = None
        if whole is not None:
            mixed = self.attention(whole, self._own(rotation), cu_seqlens=documents.others)
        own = [self._own(each) for each in rotations]
        found, after = mix_parts(self.attention, documents, parts, states, own)
        hidden = hidden + documents.join(mixed, found)
        return hidden + self.feedforward(self.feedforward_norm(hidden)), after

    def halo_tensors(self, hidden: Tensor) -> dict[str, Tensor]:
        """As `TokenMixer.halo_tensors`, from the block's input."""
        return self.attention.halo_tensors(self.attention_norm(hidden))

    def span_sums(self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None) -> dict[str, Tensor]:
        """As `TokenMixer.span_sums`, from the block's input."""
        return self.attention.span_sums(self.attention_norm(hidden), state, self._own(rotation))

    @property
    def mechanism(self) -> Mechanism | None:
        """What attends, or None where nothing does."""
        return self.attention.mechanism if isinstance(self.attention, SelfAttention) else None

    def attention_inputs(self, hidden: Tensor, rotation: Rotation | None = None) -> MechanismInputs:
        """What the mechanism is given, for calibration and reports.

        Raises:
            TypeError: a block without attention.
        """
        if not isinstance(self.attention, SelfAttention):
            raise TypeError(f"a block of {type(self.attention).__name__} has no queries and keys")
        return self.attention.project(self.attention_norm(hidden), self._own(rotation))

    def _own(self, rotation: Rotation | None) -> Rotation | None:
        return rotation if self.rotary else None
