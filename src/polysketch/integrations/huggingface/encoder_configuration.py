"""The configuration of our encoders in transformers: the fields of `EncoderConfig`."""

from typing import Any, ClassVar

from polysketch import models
from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.transformers_folder import ENCODER_TYPE
from polysketch.models.answering import encoder_preset


class PolysketchEncoderConfig(PolysketchConfig):
    """One configuration for every mechanism that sees both sides: its fields are those of `models.EncoderConfig`.

    Defaults are those of the preset "tiny", as an encoder.

    Args:
        learned_positions, block_size: as for `EncoderConfig`; all other sizes are as for `PolysketchConfig`.
        classifier_pooling: what `PolysketchEncoderForSequenceClassification` makes its scores of: the "mean" of the
            vectors of real tokens, or that of the "first" one.

    Raises:
        ValueError, TypeError: as `EncoderConfig`; another pooling.

    Example:
        `PolysketchEncoderConfig.from_preset("gpt2-small", attention="performer", num_labels=3)`
    """

    model_type: ClassVar[str] = ENCODER_TYPE
    sizes: ClassVar[type[models.ModelConfig]] = models.EncoderConfig

    attention: Any = "polysketch-paper"
    input_positions: bool = True
    projection_convolution: int = 0
    learned_positions: int = 0
    block_size: int = 0
    classifier_pooling: str = "mean"

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields and fill in the sizes."""
        if self.classifier_pooling not in ("mean", "first"):
            raise ValueError(f"classifier_pooling must be 'mean' or 'first', got {self.classifier_pooling!r}")
        super().__post_init__(**kwargs)

    @classmethod
    def _preset(cls, name: str, changes: dict[str, Any]) -> models.ModelConfig:
        return encoder_preset(name, **changes)
