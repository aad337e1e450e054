"""The configuration of an encoder of pictures."""

from dataclasses import dataclass
from typing import Any

from polysketch import attention
from polysketch.models.encoder_config import EncoderConfig
from polysketch.ops.arguments import check_at_least_one


@dataclass(frozen=True)
class PatchEncoderConfig(EncoderConfig):
    """Sizes and mechanisms of a `PatchEncoder`: those of an `EncoderConfig`, and the picture.

    Positions are two-dimensional: sinusoidal ones at the input (`input_positions`), rotary ones in the heads
    (`rotary`). A mechanism that convolves over a picture has the grid of patches for its `grid` unless its options say
    otherwise.

    Attributes:
        vocab_size: 256, the brightness of a channel.
        image_size: (height, width, channels) in pixels.
        patch_size: pixels of a side of a patch; it divides height and width.
        rope_base: of the rotary positions, as for `nn.rotation_on_grid`.

    Raises:
        TypeError, ValueError: as `EncoderConfig`; patches that do not divide the picture, heads or a hidden size that
            are no multiples of 4, or learned positions, which it has not.
    """

    input_positions: bool = True
    rope_base: float = 100.0
    image_size: tuple[int, int, int] = (28, 28, 1)
    patch_size: int = 4

    def __post_init__(self) -> None:
        self._set("image_size", tuple(self.image_size))
        height, width, channels = self.image_size
        check_at_least_one(height=height, width=width, channels=channels, patch_size=self.patch_size)
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"expected patches that divide {height} x {width} pixels, found {self.patch_size}")
        super().__post_init__()
        for name in ("hidden_size", "head_dim"):
            if getattr(self, name) % 4:
                raise ValueError(f"{name} must be a multiple of 4, for rows and columns, got {getattr(self, name)}")
        if self.learned_positions:
            raise ValueError(
                f"pictures have sinusoidal and rotary positions, got learned_positions={self.learned_positions}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) in patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    def layers(self) -> list[tuple[str, dict[str, Any]]]:
        """As the base class has it, with the grid for mechanisms that convolve over it."""
        return [(name, {**self._told(name), **options}) for name, options in super().layers()]

    def _told(self, name: str) -> dict[str, Any]:
        convolves = name in attention.MECHANISMS and "grid" in attention.option_names(name)
        return {"grid": self.grid} if convolves else {}
