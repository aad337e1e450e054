"""A model that packs a row into one vector, and reads the row out of it again."""

import torch
from torch import Tensor, nn

from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.models.base import TokenModel
from polysketch.models.config import ModelConfig
from polysketch.models.mean_cross_entropy import mean_token_loss
from polysketch.models.tokens import check_targets
from polysketch.models.transformer_lm import TransformerLM
from polysketch.nn import sinusoidal_positions


class SequenceAutoencoder(TokenModel):
    """A causal model whose last vector has to hold the whole row; a network without attention reads it out.

    For each place of the row, sinusoidal positions are added to that vector, and two layers with GELU, each behind a
    norm and as wide as the vector, make of it what the token is read from: MAD's compression (Poli et al. 2024). One
    departure: the embedding is the output layer too, as in the language model.

    Args:
        config: of the causal model.

    Attributes:
        language_model: the `TransformerLM`.
        reader: the two layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.language_model, width = TransformerLM(config), config.hidden_size
        self.reader = nn.Sequential(*_layer(config), *_layer(config), nn.LayerNorm(width, eps=config.norm_epsilon))

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the language model."""
        return self.language_model.all_blocks

    def calibrate(self, ids: Tensor) -> None:
        """As `TransformerLM.calibrate`."""
        self.language_model.calibrate(ids)

    def forward(self, ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Logits of the token at every place.

        Args:
            ids: (batch, length) int64.
            key_mask: (batch, length) bool, True for a real token, with padding behind them alone: the last real one has
                to hold the row.

        Returns:
            (batch, length, vocab_size). Prefer `loss` for training.
        """
        return self.language_model.logits(self._read(ids, key_mask))

    def logits_at(self, asked: Tensor, *, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Logits of the tokens at some places.

        Args:
            asked: (batch, length) bool.
            ids, key_mask: as for `forward`.

        Returns:
            (number of places asked, vocab_size), row after row.
        """
        return self.language_model.logits(self._read(ids, key_mask)[asked])

    def loss(self, ids: Tensor, targets: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats; a scalar.

        Args:
            ids, key_mask: as for `forward`.
            targets: (batch, length) int64, the tokens; -100 where none is asked for.

        Raises:
            ValueError: ids that are no tokens, targets of another shape or beyond the vocabulary, or none.
        """
        model = self.language_model
        check_targets(ids, targets, model.config.vocab_size)
        return mean_token_loss(self._read(ids, key_mask), model.embedding.weight, model.output_bias, targets)

    def _read(self, ids: Tensor, key_mask: Tensor | None) -> Tensor:
        """(batch, length, hidden_size), what each token is read from."""
        hidden = self.language_model.hidden_states(ids)  # what stands behind a row changes nothing before it
        if key_mask is None:
            packed = hidden[:, -1]
        else:
            packed = hidden[torch.arange(len(ids), device=ids.device), key_mask.sum(1) - 1]
        places = sinusoidal_positions(torch.arange(ids.shape[1], device=ids.device), hidden.shape[-1])
        return self.reader(packed[:, None] + places.to(hidden.dtype))


def _layer(config: ModelConfig) -> list[nn.Module]:
    linear = nn.Linear(config.hidden_size, config.hidden_size)
    lecun_normal_(linear.weight, config.hidden_size)
    nn.init.zeros_(linear.bias)
    return [nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon), linear, nn.GELU()]
