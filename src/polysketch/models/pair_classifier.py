"""An encoder that reads two documents, and what says which class the two have."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.models.base import TokenModel
from polysketch.models.encoder import TransformerEncoder, class_loss, mean_of_real
from polysketch.models.encoder_config import EncoderConfig


class PairClassifier(TokenModel):
    """Two towers with the same weights: a class for each pair of documents.

    Each document is read alone, and its vectors become one, their mean: a and b. Two hidden layers with ReLU read
    [a, b, a b, a - b], as in Long Range Arena (Tay et al. 2021, section 2.2.3): so two documents are compared by what
    an encoder keeps of each.

    Args:
        config: of the encoder. The first hidden layer is as wide as its feed-forward layers, the second half of it.
        num_classes: at least 2.

    Attributes:
        encoder: the `TransformerEncoder`.
        output: from both documents to logits.

    Raises:
        ValueError: fewer than two classes.
    """

    def __init__(self, config: EncoderConfig, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        self.encoder = TransformerEncoder(config)
        width = config.feedforward_size
        sizes = [4 * config.hidden_size, width, width // 2, num_classes]
        layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
        self.output = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        for layer in layers:
            lecun_normal_(layer.weight, layer.in_features)
            nn.init.zeros_(layer.bias)

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the encoder."""
        return list(self.encoder.blocks)

    def forward(
        self, ids: Tensor, second: Tensor, *, key_mask: Tensor | None = None, second_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the classes of pairs.

        Args:
            ids, second: (batch, length) and (batch, another length) int64, the documents.
            key_mask, second_mask: likewise bool, True for a real token; every document needs one.

        Returns:
            (batch, num_classes).
        """
        a = mean_of_real(self.encoder(ids, key_mask=key_mask), key_mask)
        b = mean_of_real(self.encoder(second, key_mask=second_mask), second_mask)
        return self.output(torch.cat([a, b, a * b, a - b], -1))

    def logits_at(self, asked: Tensor, **inputs: Tensor) -> Tensor:
        """Logits of some rows.

        Args:
            asked: (batch,) bool.
            inputs: as for `forward`.

        Returns:
            (number of rows asked, num_classes).
        """
        return self(**inputs)[asked]

    def loss(
        self,
        ids: Tensor,
        second: Tensor,
        targets: Tensor,
        *,
        key_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats; a scalar.

        Args:
            ids, second, key_mask, second_mask: as for `forward`.
            targets: (batch,) int64, the class of each pair, from 0 to num_classes - 1.

        Raises:
            ValueError: targets of another shape or out of range.
        """
        return class_loss(self(ids, second, key_mask=key_mask, second_mask=second_mask), targets)
