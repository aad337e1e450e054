"""The bidirectional encoder, for every mechanism that sees both sides, and what stands on top of it."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.models.base import TokenModel
from polysketch.models.block_encoder import BlockEncoder
from polysketch.models.encoder_config import EncoderConfig
from polysketch.models.mean_cross_entropy import mean_token_loss
from polysketch.models.output_layer import wide
from polysketch.models.state import ModelState
from polysketch.models.tokens import check_ids, check_targets, positions_of
from polysketch.nn import Rotation, rotation_at, sinusoidal_positions


class TransformerEncoder(BlockEncoder):
    """Token ids -> a vector for each token, which sees the whole sequence, or its own block and all before it.

    The blocks are those of `TransformerLM`, without the causal mask: embedded tokens times sqrt(hidden_size), positions
    (learned, sinusoidal or rotary, as the configuration says), pre-norm blocks, a final norm. Weights begin as there.

    With `config.block_size` a sequence may come a block at a time, too: `extend`.

    Args:
        config: sizes and mechanisms.

    Raises:
        ValueError: a `block_size` that a mechanism with its options does not take.

    Attributes:
        config: as given.
        activation_checkpointing: recompute each block in backward instead of keeping what is inside it; False at
            first.
    """

    def add_embedding(self) -> None:
        """Embeddings of tokens, and of positions where they are learned."""
        config, positions = self.config, self.config.learned_positions
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(positions, config.hidden_size) if positions else None

    def reset_embedding(self) -> None:
        """Normals of variance 1 / hidden_size for tokens."""
        nn.init.normal_(self.embedding.weight, std=self.config.hidden_size**-0.5)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The last layer's vectors, after the final norm.

        Args:
            ids: (batch, length) int64.
            key_mask: (batch, length) bool, True for a real token; rows may be padded on either side. What stands at
                padding changes nothing, and what comes out there means nothing.

        Returns:
            (batch, length, hidden_size).

        Raises:
            ValueError: ids that are no tokens, or a real token beyond the learned positions.
        """
        hidden, rotation = self._embed(ids, key_mask)
        return self.run_blocks(hidden, rotation, key_mask)

    def init_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """The state before the first block; device and dtype are the model's where they are None.

        Raises:
            ValueError: the configuration has no `block_size`.
        """
        self._expect_blocks()
        like = self.final_norm.weight
        device, dtype = like.device if device is None else device, like.dtype if dtype is None else dtype
        blocks: list[Any] = list(self.blocks)
        layers = [block.attention.init_state(batch_size, device, dtype) for block in blocks]
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64, device="cpu"), device)

    @torch.no_grad()
    def extend(self, ids: Tensor, state: ModelState, *, key_mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """`forward` of the next blocks, given those before them; no gradient.

        A block is tried on `state.clone()`, as often as wanted, and then taken on the state itself.

        Args:
            ids: (batch, new tokens) int64: whole blocks, the last one of a sequence perhaps short.
            state: from `init_state` or an earlier call; updated in place.
            key_mask: (batch, new tokens) bool, True for a real token.

        Returns:
            (batch, new tokens, hidden_size), and the same state.

        Raises:
            ValueError: as for `forward`, a state inside a block, or no `block_size` in the configuration.
        """
        self._expect_blocks()
        positions, next_position = state.next_positions(ids.shape[1], key_mask)
        hidden, rotation = self._embed_at(ids, positions.to(ids.device), key_mask)
        options = {"block_size": self.config.block_size, "key_mask": key_mask}
        blocks: list[Any] = list(self.blocks)
        for index, block in enumerate(blocks):
            hidden, state.layers[index] = block.extend(hidden, state.layers[index], rotation, **options)
        state.pass_(ids.shape[1], next_position)
        return self.final_norm(hidden), state

    def _expect_blocks(self) -> None:
        if not self.config.block_size:
            raise ValueError("a sequence comes a block at a time where the configuration has a block_size, got 0")

    def _embed(self, ids: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Rotation]:
        return self._embed_at(ids, positions_of(ids, key_mask), key_mask)

    def _embed_at(self, ids: Tensor, positions: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Rotation]:
        config = self.config
        check_ids(ids, config.vocab_size, self.final_norm.weight.device)
        hidden = self.embedding(ids) * config.hidden_size**0.5
        if config.input_positions:
            hidden = hidden + sinusoidal_positions(positions, config.hidden_size).to(hidden.dtype)
        if self.positions is not None:
            hidden = hidden + self.positions(self._with_learned(positions, key_mask))
        return hidden, rotation_at(positions, config.head_dim, config.rope_base)

    def _with_learned(self, positions: Tensor, key_mask: Tensor | None) -> Tensor:
        """Positions that have learned vectors: padding, which may stand beyond them all, takes the first.

        Raises:
            ValueError: a real token stands beyond them. In a compiled graph the table of vectors itself refuses it.
        """
        if key_mask is not None:
            positions = positions.masked_fill(~key_mask, 0)
        if positions.dim() == 1:
            self._require_position(len(positions))
        elif positions.numel() and not torch.compiler.is_compiling():
            self._require_position(int(positions.max()) + 1)
        return positions

    def _require_position(self, length: int) -> None:
        if length > self.config.learned_positions:
            raise ValueError(
                f"expected at most {self.config.learned_positions} tokens, which have learned positions, got {length}"
            )


class MaskedLanguageModel(TokenModel):
    """An encoder that predicts tokens from both sides: the embedding again as output layer, with a bias.

    Args:
        config: of the encoder.

    Attributes:
        encoder: the `TransformerEncoder`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = TransformerEncoder(config)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the encoder."""
        return list(self.encoder.blocks)

    def forward(self, ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """(batch, length) int64 -> logits (batch, length, vocab_size); prefer `loss` for training."""
        hidden = self.encoder(ids, key_mask=key_mask)
        return nn.functional.linear(hidden, self.encoder.embedding.weight, self.output_bias)

    def extend(self, ids: Tensor, state: ModelState, *, key_mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Logits (batch, new tokens, vocab_size) of the next blocks, as `TransformerEncoder.extend`; no gradient."""
        hidden, state = self.encoder.extend(ids, state, key_mask=key_mask)
        with torch.no_grad():
            return nn.functional.linear(hidden, self.encoder.embedding.weight, self.output_bias), state

    def logits_at(self, asked: Tensor, *, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Logits at some tokens.

        Args:
            asked: (batch, length) bool.
            ids, key_mask: as for `forward`.

        Returns:
            (number of tokens asked, vocab_size), row after row.
        """
        hidden = self.encoder(ids, key_mask=key_mask)[asked]
        return nn.functional.linear(hidden, self.encoder.embedding.weight, self.output_bias)

    def loss(self, ids: Tensor, targets: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats of the tokens that are to be predicted; a scalar. The logits are never all held.

        Args:
            ids: (batch, length) int64, some of them masked (`data.mask_tokens`).
            targets: (batch, length) int64, the tokens that stood there; -100 where nothing is to be predicted.
            key_mask: as for `TransformerEncoder.forward`.

        Raises:
            ValueError: as for `TransformerEncoder.forward`; targets of another shape or beyond the vocabulary, or none.
        """
        check_targets(ids, targets, self.encoder.config.vocab_size)
        hidden = self.encoder(ids, key_mask=key_mask)
        return mean_token_loss(hidden, self.encoder.embedding.weight, self.output_bias, targets)


class SequenceClassifier(TokenModel):
    """An encoder that gives each sequence one of several classes.

    Args:
        config: of the encoder.
        num_classes: at least 2.
        pooling: "mean" of the vectors of real tokens, or that of the "first" real token.

    Attributes:
        encoder: the `TransformerEncoder`.
        output: from a pooled vector to logits.

    Raises:
        ValueError: fewer than two classes, or another pooling.
    """

    def __init__(self, config: EncoderConfig, num_classes: int, *, pooling: Literal["mean", "first"] = "mean") -> None:
        super().__init__()
        if pooling not in ("mean", "first"):
            raise ValueError(f"pooling must be 'mean' or 'first', got {pooling!r}")
        self.encoder, self.pooling = TransformerEncoder(config), pooling
        self.output = _class_layer(config, num_classes)

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the encoder."""
        return list(self.encoder.blocks)

    def forward(self, ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """(batch, length) int64 -> logits (batch, num_classes).

        Args:
            ids, key_mask: as for `TransformerEncoder.forward`; every row needs a real token.
        """
        return self.output(pooled(self.encoder(ids, key_mask=key_mask), key_mask, self.pooling))

    def logits_at(self, asked: Tensor, *, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Logits of some rows.

        Args:
            asked: (batch,) bool.
            ids, key_mask: as for `forward`.

        Returns:
            (number of rows asked, num_classes).
        """
        return self(ids, key_mask=key_mask)[asked]

    def loss(self, ids: Tensor, targets: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats; a scalar.

        Args:
            ids, key_mask: as for `forward`.
            targets: (batch,) int64, the class of each row, from 0 to num_classes - 1.

        Raises:
            ValueError: targets of another shape or out of range.
        """
        return class_loss(self(ids, key_mask=key_mask), targets)


class TokenClassifier(TokenModel):
    """An encoder that gives each token one of several classes.

    Args:
        config: of the encoder.
        num_classes: at least 2.

    Attributes:
        encoder: the `TransformerEncoder`.
        output: from a token's vector to logits.

    Raises:
        ValueError: fewer than two classes.
    """

    def __init__(self, config: EncoderConfig, num_classes: int) -> None:
        super().__init__()
        self.encoder, self.output = TransformerEncoder(config), _class_layer(config, num_classes)

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the encoder."""
        return list(self.encoder.blocks)

    def forward(self, ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """(batch, length) int64 -> logits (batch, length, num_classes).

        Args:
            ids, key_mask: as for `TransformerEncoder.forward`.
        """
        return self.output(self.encoder(ids, key_mask=key_mask))

    def logits_at(self, asked: Tensor, *, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Logits of some tokens.

        Args:
            asked: (batch, length) bool.
            ids, key_mask: as for `forward`.

        Returns:
            (number of tokens asked, num_classes), row after row.
        """
        return self.output(self.encoder(ids, key_mask=key_mask)[asked])

    def loss(self, ids: Tensor, targets: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats of the tokens that have a class; a scalar.

        Args:
            ids, key_mask: as for `forward`.
            targets: (batch, length) int64, the class of each token; -100 where there is none.

        Raises:
            ValueError: targets of another shape or out of range, or none.
        """
        check_targets(ids, targets, self.output.out_features)
        logits = self(ids, key_mask=key_mask)
        return nn.functional.cross_entropy(logits.to(wide(logits.dtype)).transpose(1, 2), targets)


def pooled(hidden: Tensor, key_mask: Tensor | None, pooling: str) -> Tensor:
    """One vector for each row.

    Args:
        hidden: (batch, length, hidden_size).
        key_mask: (batch, length) bool, True for a real token; every row has one. None where all are.
        pooling: "mean" of the vectors of real tokens, or that of the "first" real token.

    Returns:
        (batch, hidden_size).
    """
    if pooling == "mean":
        return mean_of_real(hidden, key_mask)
    if key_mask is None:
        return hidden[:, 0]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), key_mask.int().argmax(1)]


def mean_of_real(hidden: Tensor, key_mask: Tensor | None) -> Tensor:
    """(batch, length, width) -> (batch, width), the mean over tokens, without those that `key_mask` calls padding.

    Summed in `wide` numbers: sums of float16, and a count of 65,520 tokens, are beyond its largest.
    """
    if key_mask is None:
        return hidden.mean(1)
    of_sum = wide(hidden.dtype)
    real = hidden.masked_fill(~key_mask[..., None], 0.0).sum(1, dtype=of_sum)
    return (real / key_mask.sum(1, keepdim=True).to(of_sum)).to(hidden.dtype)


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of (batch, classes) logits; on a GPU values of targets are not read.

    Raises:
        ValueError: no rows; targets of another shape than (batch,), of another dtype than int64, or out of range.
    """
    rows, classes = logits.shape
    if not rows:
        raise ValueError("expected at least one row, whose class a loss is of, found none")
    if targets.shape != (rows,) or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 of shape ({rows},), got {targets.dtype} {targets.shape}")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise ValueError(f"targets must lie in [0, {classes}), got {low} to {high}")
    return nn.functional.cross_entropy(logits.to(wide(logits.dtype)), targets)


def _class_layer(config: EncoderConfig, num_classes: int) -> nn.Linear:
    """From a vector to the logits of at least two classes."""
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    output = nn.Linear(config.hidden_size, num_classes)
    lecun_normal_(output.weight, config.hidden_size)
    nn.init.zeros_(output.bias)
    return output
