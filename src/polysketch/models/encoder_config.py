"""The configuration of an encoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polysketch import attention
from polysketch.models.config import ModelConfig
from polysketch.nn import check_mixer, mixer_class


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """Sizes and mechanisms of a `TransformerEncoder`: those of a `ModelConfig`, and learned positions.

    Attributes:
        attention: as there; every layer must take `causal=False`.
        learned_positions: how many learned positions are added to the embedded tokens, the longest sequence then; 0 for
            none. Beside them may be sinusoidal ones (`input_positions`) and rotary ones (`rotary`).

    Raises:
        TypeError, ValueError: as `ModelConfig`; a mechanism that is causal only, or a convolution of projections, which
            is.
    """

    attention: str | tuple[str, ...] = "polysketch-paper"
    input_positions: bool = False
    learned_positions: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.learned_positions) is not int or self.learned_positions < 0:
            raise ValueError(f"learned_positions must be a number of positions, or 0, got {self.learned_positions!r}")
        if self.projection_convolution:
            raise ValueError("projection_convolution is causal only, and an encoder sees both sides: leave it out")

    def _check_layer(self, name: str, options: Mapping[str, Any]) -> None:
        if not getattr(mixer_class(name), "is_bidirectional", False):
            both = ", ".join(sorted(known for known, kind in attention.MECHANISMS.items() if kind.is_bidirectional))
            raise ValueError(
                f"layer {name!r} is causal only, and an encoder sees both sides; mechanisms for it: {both}"
            )
        check_mixer(name, options)
