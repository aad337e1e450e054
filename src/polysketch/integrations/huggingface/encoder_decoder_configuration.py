"""The configuration of an encoder and a decoder in transformers: those of both, and what stands between them."""

from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from polysketch import models
from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.huggingface.encoder_configuration import PolysketchEncoderConfig
from polysketch.integrations.transformers_folder import ENCODER_DECODER_TYPE
from polysketch.models.former import FORMAT


class PolysketchEncoderDecoderConfig(PreTrainedConfig):
    """One configuration for every mechanism on either side: the fields of `models.EncoderDecoderConfig`.

    Args:
        encoder: a `PolysketchEncoderConfig`, or its fields as a dictionary; None for its defaults.
        decoder: a `PolysketchConfig` of the side that writes, likewise.
        cross, cross_options: the mechanism by which the decoder attends to the encoded source, and its options.
        decoder_start_token_id: with what every target begins.
        bos_token_id, eos_token_id, pad_token_id: of the tokenizer.
        model_format: of what is saved.
        training_run: what `polysketch export` knows of the run the weights come from; plain data.

    Raises:
        ValueError, TypeError: as `EncoderConfig` and `ModelConfig`.
    """

    model_type: ClassVar[str] = ENCODER_DECODER_TYPE
    sub_configs: ClassVar[dict[str, Any]] = {"encoder": PolysketchEncoderConfig, "decoder": PolysketchConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "encoder_last_hidden_state"]

    encoder: Any = None
    decoder: Any = None
    cross: str = "linear"
    cross_options: dict[str, Any] | None = None
    is_encoder_decoder: bool = True
    use_cache: bool = True
    tie_word_embeddings: bool = True
    decoder_start_token_id: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    model_format: int = FORMAT
    training_run: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Make configurations of both sides."""
        for name, kind in self.sub_configs.items():
            given = getattr(self, name)
            setattr(self, name, given if isinstance(given, kind) else kind.from_dict(_explicit(given)))
        self.cross_options = {} if self.cross_options is None else self.cross_options
        super().__post_init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Token ids of what is written."""
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the decoder."""
        return self.decoder.hidden_size

    def to_model_config(self) -> models.EncoderDecoderConfig:
        """The configuration of the `TransformerEncoderDecoder` inside."""
        encoder, decoder = self.encoder.to_model_config(), self.decoder.to_model_config()
        return models.EncoderDecoderConfig(encoder, decoder, self.cross, dict(self.cross_options or {}))

    @classmethod
    def from_model_config(cls, config: models.EncoderDecoderConfig, **changes: Any) -> Self:
        """The configuration of a model like `config`; `changes` are fields that `config` does not have."""
        return cls(**config.to_dict(), **changes)


def _explicit(given: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of one side; those that say nothing of their format are of today's."""
    return {"model_format": FORMAT, **(given or {})}
