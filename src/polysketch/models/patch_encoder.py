"""A vision transformer: an encoder of the patches of a picture, and its classifier."""

from typing import cast

import torch
from torch import Tensor, nn

from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.models.base import TokenModel
from polysketch.models.block_encoder import BlockEncoder
from polysketch.models.encoder import class_loss
from polysketch.models.patch_encoder_config import PatchEncoderConfig
from polysketch.nn import rotation_on_grid, sinusoidal_positions_on_grid


class PatchEncoder(BlockEncoder):
    """Pixels -> a vector for each patch, which sees the whole picture.

    The vision transformer of Dosovitskiy et al. (ICLR 2021), section 3.1, with the blocks of this library. Each patch
    is a token: its pixels, brightness from -1 to 1, go through one linear layer. There is no class token. Positions are
    two-dimensional.

    Args:
        config: a `PatchEncoderConfig`.
    """

    def add_embedding(self) -> None:
        """A linear layer of the pixels of a patch."""
        config = cast(PatchEncoderConfig, self.config)
        self.embedding = nn.Linear(config.patch_size**2 * config.image_size[2], config.hidden_size)

    def reset_embedding(self) -> None:
        """Truncated normals of variance 1 / fan_in."""
        lecun_normal_(self.embedding.weight, self.embedding.in_features)
        nn.init.zeros_(self.embedding.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """The last layer's vectors, after the final norm.

        Args:
            pixels: (batch, height * width * channels) uint8, line by line, the channels of a pixel side by side.

        Returns:
            (batch, patches, hidden_size), the patches line by line.

        Raises:
            ValueError: another shape, dtype or device.
        """
        config, weight = cast(PatchEncoderConfig, self.config), self.embedding.weight
        _check_pixels(pixels, config, weight.device)
        hidden = self.embedding(patches_of(pixels, config).to(weight.dtype) / 127.5 - 1.0)
        if config.input_positions:
            places = sinusoidal_positions_on_grid(config.grid, config.hidden_size, pixels.device)
            hidden = hidden + places.to(hidden.dtype)
        rotation = rotation_on_grid(config.grid, config.head_dim, config.rope_base, device=pixels.device)
        return self.run_blocks(hidden, rotation)


class PatchClassifier(TokenModel):
    """An encoder that gives each picture one of several classes, by the mean of its patches.

    Args:
        config: of the encoder.
        num_classes: at least 2.

    Attributes:
        encoder: the `PatchEncoder`.
        output: from the mean to logits.

    Raises:
        ValueError: fewer than two classes.
    """

    def __init__(self, config: PatchEncoderConfig, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        self.encoder = PatchEncoder(config)
        self.output = nn.Linear(config.hidden_size, num_classes)
        lecun_normal_(self.output.weight, config.hidden_size)
        nn.init.zeros_(self.output.bias)

    @property
    def all_blocks(self) -> list[nn.Module]:
        """Those of the encoder."""
        return list(self.encoder.blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, height * width * channels) uint8 -> logits (batch, num_classes)."""
        return self.output(self.encoder(pixels).mean(1))

    def logits_at(self, asked: Tensor, *, pixels: Tensor) -> Tensor:
        """Logits of some pictures.

        Args:
            asked: (batch,) bool.
            pixels: as for `forward`.

        Returns:
            (number of pictures asked, num_classes).
        """
        return self(pixels)[asked]

    def loss(self, pixels: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; a scalar.

        Args:
            pixels: as for `forward`.
            targets: (batch,) int64, the class of each picture, from 0 to num_classes - 1.

        Raises:
            ValueError: targets of another shape or out of range.
        """
        return class_loss(self(pixels), targets)


def patches_of(pixels: Tensor, config: PatchEncoderConfig) -> Tensor:
    """(batch, height * width * channels) -> (batch, patches, pixels of a patch times channels), all line by line."""
    (rows, columns), side = config.grid, config.patch_size
    parts = pixels.reshape(-1, rows, side, columns, side, config.image_size[2])
    return parts.transpose(2, 3).reshape(-1, rows * columns, side * side * config.image_size[2])


def _check_pixels(pixels: Tensor, config: PatchEncoderConfig, device: torch.device) -> None:
    height, width, channels = config.image_size
    if pixels.dim() != 2 or pixels.shape[1] != height * width * channels or pixels.dtype != torch.uint8:
        raise ValueError(
            f"pixels must be uint8 of shape (batch, {height} * {width} * {channels}), got {pixels.dtype} of "
            f"{tuple(pixels.shape)}"
        )
    if pixels.device != device:
        raise ValueError(f"pixels are on {pixels.device} but the model is on {device}: move one of them")
