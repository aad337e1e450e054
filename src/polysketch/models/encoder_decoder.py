"""An encoder and a decoder that reads it: sequence to sequence, for every mechanism."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polysketch import attention
from polysketch.models.base import TokenModel
from polysketch.models.blocks import build_block
from polysketch.models.config import ModelConfig, require_configuration
from polysketch.models.encoder import TransformerEncoder
from polysketch.models.encoder_config import EncoderConfig
from polysketch.models.mean_cross_entropy import mean_token_loss
from polysketch.models.state import ModelState
from polysketch.models.tokens import check_ids, check_targets, positions_of
from polysketch.nn import Rotation, TransformerBlock, rotation_at, sinusoidal_positions
from polysketch.nn.cross_attention import CrossAttention


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Sizes and mechanisms of a `TransformerEncoderDecoder`.

    Attributes:
        encoder: reads the source.
        decoder: writes the target; causal.
        cross: the mechanism by which every layer of the decoder attends to the encoded source. Not every one can:
            docs/choosing.md has the table.
        cross_options: its options.
    """

    encoder: EncoderConfig
    decoder: ModelConfig
    cross: str = "softmax"
    cross_options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; `from_dict` gives an equal configuration back."""
        sides = {"encoder": self.encoder.to_dict(), "decoder": self.decoder.to_dict()}
        return {**sides, "cross": self.cross, "cross_options": dict(self.cross_options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EncoderDecoderConfig":
        """The configuration that `to_dict` described.

        Raises:
            TypeError, ValueError: as `EncoderConfig` and `ModelConfig`.
        """
        encoder, decoder = EncoderConfig.from_dict(values["encoder"]), ModelConfig.from_dict(values["decoder"])
        return cls(encoder, decoder, values["cross"], dict(values["cross_options"]))


class DecoderBlock(nn.Module):
    """A transformer block with cross-attention in the middle: x + cross(norm(x), source) behind self-attention.

    Args:
        config: of the whole model.
        name, options: of the layer's self-attention.

    Attributes:
        block: self-attention and the feed-forward layer, with their norms.
        cross_norm, cross: what stands between the two.
    """

    def __init__(self, config: EncoderDecoderConfig, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        decoder = config.decoder
        self.block = build_block(decoder, name, options)
        self.cross_norm = nn.LayerNorm(decoder.hidden_size, eps=decoder.norm_epsilon)
        sizes = {"num_heads": decoder.num_heads, "head_dim": decoder.head_dim, "num_kv_heads": decoder.num_kv_heads}
        mechanism = attention.build(config.cross, **sizes, **config.cross_options)
        self.cross = CrossAttention(
            decoder.hidden_size, config.encoder.hidden_size, mechanism, query_key_norm=decoder.query_key_norm
        )

    def reset_parameters(self, residual_scale: float) -> None:
        """Initialise the projections; outputs added to the residual stream are scaled by `residual_scale`."""
        self.block.reset_parameters(residual_scale)
        self.cross.reset_parameters(residual_scale)

    def forward(
        self,
        hidden: Tensor,
        source: Tensor,
        rotation: Rotation,
        *,
        source_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, length, hidden_size) -> the same.

        Args:
            hidden: of the target.
            source: (batch, source length, width of the encoder).
            rotation: of the target's positions.
            source_mask: (batch, source length) bool, True for a real token.
            key_mask: (batch, length) bool, True for a real token of the target.
        """
        block = self.block
        hidden = hidden + block.attention(block.attention_norm(hidden), _own(block, rotation), key_mask=key_mask)
        hidden = hidden + self.cross(self.cross_norm(hidden), source, source_mask=source_mask)
        return hidden + block.feedforward(block.feedforward_norm(hidden))

    def extend(
        self, hidden: Tensor, state: Any, source: Any, rotation: Rotation, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The block for new tokens that follow those in `state`, which is updated in place.

        Args:
            hidden: of the new tokens.
            state: of self-attention.
            source: from `cross.read_source`.
            rotation: of the new tokens' positions.
            key_mask: (batch, new tokens) bool, True for a real token.
        """
        block = self.block
        normed = block.attention_norm(hidden)
        mixed, state = block.attention.extend(normed, state, _own(block, rotation), key_mask=key_mask)
        hidden = hidden + mixed
        hidden = hidden + self.cross.ask_source(self.cross_norm(hidden), source)
        return hidden + block.feedforward(block.feedforward_norm(hidden)), state


class TransformerEncoderDecoder(TokenModel):
    """A source of token ids, and a target of which every token sees those before it and the whole source.

    The source is read by a `TransformerEncoder`; the decoder's blocks are those of a `TransformerLM` with
    cross-attention between self-attention and the feed-forward layer. Each side has its own embedding; the decoder's is
    its output layer too, with a bias.

    Args:
        config: sizes and mechanisms.

    Raises:
        TypeError: the configuration is none.

    Attributes:
        config: as given.
        activation_checkpointing: recompute each block of the decoder in backward instead of keeping what is inside it;
            False at first. The encoder has its own.
        encoder: the `TransformerEncoder`.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        require_configuration(config, EncoderDecoderConfig)
        super().__init__()
        self.config, decoder = config, config.decoder
        self.activation_checkpointing = False
        self.encoder = TransformerEncoder(config.encoder)
        self.embedding = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.blocks = nn.ModuleList(DecoderBlock(config, name, options) for name, options in decoder.layers())
        self.final_norm = nn.LayerNorm(decoder.hidden_size, eps=decoder.norm_epsilon)
        self.output_bias = nn.Parameter(torch.zeros(decoder.vocab_size))
        nn.init.normal_(self.embedding.weight, std=decoder.hidden_size**-0.5)
        for block in self.blocks:
            block.reset_parameters((3 * decoder.num_layers) ** -0.5)  # three additions a block

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the encoder, then those of the decoder."""
        return [*self.encoder.blocks, *self.blocks]

    def forward(
        self, source: Tensor, ids: Tensor, *, source_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of every target token's successor.

        Args:
            source: (batch, source length) int64.
            ids: (batch, length) int64, the target from its start token on.
            source_mask: (batch, source length) bool, True for a real token, padded on either side.
            key_mask: (batch, length) bool, True for a real token of the target; rows are padded on the left.

        Returns:
            (batch, length, vocab_size). Prefer `loss` for training: it never holds all of these.
        """
        return self.logits(self._hidden_states(source, ids, source_mask, key_mask))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) after the final norm -> (..., vocab_size)."""
        return nn.functional.linear(hidden, self.embedding.weight, self.output_bias)

    def logits_at(self, asked: Tensor, *, source: Tensor, ids: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Logits of the successors of some target tokens.

        Args:
            asked: (batch, length) bool.
            source, ids, source_mask: as for `forward`.

        Returns:
            (number of tokens asked, vocab_size), row after row.
        """
        return self.logits(self._hidden_states(source, ids, source_mask)[asked])

    def loss(self, source: Tensor, ids: Tensor, targets: Tensor, *, source_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats; a scalar.

        Args:
            source, ids, source_mask: as for `forward`.
            targets: (batch, length) int64, what each token of `ids` is to predict; -100 for nothing.

        Raises:
            ValueError: ids that are no tokens, targets of another shape or beyond the vocabulary, or none.
        """
        check_targets(ids, targets, self.config.decoder.vocab_size)
        hidden = self._hidden_states(source, ids, source_mask)
        return mean_token_loss(hidden, self.embedding.weight, self.output_bias, targets)

    @torch.no_grad()
    def given(self, source: Tensor, *, source_mask: Tensor | None = None) -> "GivenSource":
        """The decoder as a language model whose source is fixed: what `generation.generate` continues prompts with.

            generate(model.given(source), [[start]] * len(source), max_new_tokens=50, stop=end)

        Args:
            source, source_mask: as for `forward`. The source is read once.
        """
        return self.given_encoded(self.encoder(source, key_mask=source_mask), source_mask=source_mask)

    @torch.no_grad()
    def given_encoded(self, encoded: Tensor, *, source_mask: Tensor | None = None) -> "GivenSource":
        """As `given`, of a source that the encoder has read.

        Args:
            encoded: (batch, source length, width of the encoder).
            source_mask: as for `forward`.
        """
        sources = [block.cross.read_source(encoded, source_mask=source_mask) for block in self.blocks]
        return GivenSource(self, sources, encoded.shape[0])

    def hidden_states(
        self, encoded: Tensor, ids: Tensor, *, source_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """(batch, length, hidden_size) after the final norm.

        Args:
            encoded: (batch, source length, width of the encoder), what the encoder gave.
            ids, source_mask, key_mask: as for `forward`.
        """
        hidden, rotation = self.embed(ids, positions_of(ids, key_mask))
        masks: dict[str, Any] = {"source_mask": source_mask, "key_mask": key_mask}
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, encoded, rotation, **masks, use_reentrant=False)
            else:
                hidden = block(hidden, encoded, rotation, **masks)
        return self.final_norm(hidden)

    def _hidden_states(
        self, source: Tensor, ids: Tensor, source_mask: Tensor | None, key_mask: Tensor | None = None
    ) -> Tensor:
        encoded = self.encoder(source, key_mask=source_mask)
        return self.hidden_states(encoded, ids, source_mask=source_mask, key_mask=key_mask)

    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Embedded target tokens at these positions, and their rotation."""
        config = self.config.decoder
        check_ids(ids, config.vocab_size, self.output_bias.device)
        hidden = self.embedding(ids) * config.hidden_size**0.5
        if config.input_positions:
            hidden = hidden + sinusoidal_positions(positions, config.hidden_size).to(hidden.dtype)
        return hidden, rotation_at(positions, config.head_dim, config.rope_base)


class GivenSource(nn.Module):
    """A decoder whose source is fixed, as a language model; from `TransformerEncoderDecoder.given`.

    Args:
        model: the encoder and decoder.
        sources: what each layer of the decoder has read of the source (`CrossAttention.read_source`).
        rows: of the source.

    Attributes:
        config: of the decoder.
        sources: as given.
        rows: as given.
    """

    def __init__(self, model: TransformerEncoderDecoder, sources: list[Any], rows: int) -> None:
        super().__init__()
        self.config, self._model = model.config.decoder, model
        self.sources, self.rows = sources, rows

    @property
    def output_bias(self) -> Tensor:
        """The decoder's."""
        return self._model.output_bias

    @property
    def source_bytes(self) -> int:
        """Bytes of what was read of the source: constant for cross-attention on features, and else as the source."""
        return sum(source.nbytes for source in self.sources)

    def init_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """The state before the first token of the target, without the source, which does not change.

        Args:
            batch_size: as many rows as the source has.
            device, dtype: the model's where they are None.

        Raises:
            ValueError: another number of rows.
        """
        if batch_size != self.rows:
            raise ValueError(f"the source has {self.rows} rows, got {batch_size}")
        bias = self.output_bias
        device, dtype = bias.device if device is None else device, bias.dtype if dtype is None else dtype
        layers = [block.block.attention.init_state(batch_size, device, dtype) for block in self._model.blocks]
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64, device="cpu"), device)

    def reordered(self, indices: Tensor) -> "GivenSource":
        """The same model, given the rows `indices` (int64) of the source, repeated or dropped as they are named."""
        return GivenSource(self._model, [source.reorder(indices) for source in self.sources], len(indices))

    def why_not_captured(self, state: ModelState) -> str | None:
        """Why a device's graph of a step would not serve every token."""
        return "a graph of a step that reads a source is not made"

    def logits(self, hidden: Tensor) -> Tensor:
        """As `TransformerEncoderDecoder.logits`."""
        return self._model.logits(hidden)

    @torch.no_grad()
    def extend(self, ids: Tensor, state: ModelState, *, key_mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Logits for new tokens that follow those in `state`; as `TransformerLM.extend`."""
        hidden, state = self.extend_hidden(ids, state, key_mask=key_mask)
        return self.logits(hidden), state

    @torch.no_grad()
    def extend_hidden(
        self, ids: Tensor, state: ModelState, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """As `TransformerLM.extend_hidden`."""
        positions, moved = attention.advance_positions(state.position, ids.shape[1], key_mask)
        hidden, rotation = self._model.embed(ids, positions.to(ids.device))
        for index, block in enumerate(self._model.blocks):
            hidden, state.layers[index] = block.extend(
                hidden, state.layers[index], self.sources[index], rotation, key_mask=key_mask
            )
        state.move_to_(moved)
        return self._model.final_norm(hidden), state


def _own(block: TransformerBlock, rotation: Rotation) -> Rotation | None:
    return rotation if block.rotary else None
