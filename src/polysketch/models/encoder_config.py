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
        attention: as there; every layer must take `causal=False`, or blocks where there is a `block_size`.
        block_size: tokens of a block: a token sees its own block on both sides, and all tokens before it; 0 for the
            whole sequence. Blocks count from a row's first real token.
        learned_positions: how many learned positions are added to the embedded tokens, the longest sequence then; 0 for
            none. Beside them may be sinusoidal ones (`input_positions`) and rotary ones (`rotary`).

    Raises:
        TypeError, ValueError: as `ModelConfig`; a mechanism that is causal only or cannot see by blocks, or a
            convolution of projections, which is causal only.
    """

    attention: str | tuple[str, ...] = "polysketch-paper"
    input_positions: bool = False
    learned_positions: int = 0
    block_size: int = 0

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size < 0:
            raise ValueError(f"block_size must be a number of tokens, or 0, got {self.block_size!r}")
        super().__post_init__()
        if type(self.learned_positions) is not int or self.learned_positions < 0:
            raise ValueError(f"learned_positions must be a number of positions, or 0, got {self.learned_positions!r}")
        if self.projection_convolution:
            raise ValueError("projection_convolution is causal only, and an encoder sees both sides: leave it out")

    def _check_layer(self, name: str, options: Mapping[str, Any]) -> None:
        able = "is_blockwise" if self.block_size else "is_bidirectional"
        if not getattr(mixer_class(name), able, False):
            listed = ", ".join(attention.mechanisms_that(able))
            what = "cannot see by blocks" if self.block_size else "is causal only, and an encoder sees both sides"
            raise ValueError(f"layer {name!r} {what}; mechanisms for it: {listed}")
        check_mixer(name, options)
