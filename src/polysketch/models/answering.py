"""Which model learns what a task asks: its sizes as plain data, and the model made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polysketch import attention
from polysketch.models.autoencoder import SequenceAutoencoder
from polysketch.models.base import TokenModel
from polysketch.models.config import ModelConfig
from polysketch.models.encoder import MaskedLanguageModel, SequenceClassifier, TokenClassifier
from polysketch.models.encoder_config import EncoderConfig
from polysketch.models.encoder_decoder import EncoderDecoderConfig, TransformerEncoderDecoder
from polysketch.models.pair_classifier import PairClassifier
from polysketch.models.patch_encoder import PatchClassifier
from polysketch.models.patch_encoder_config import PatchEncoderConfig
from polysketch.models.presets import EVERY, preset, preset_attention, preset_fields
from polysketch.models.transformer_lm import TransformerLM

Sizes = ModelConfig | EncoderDecoderConfig

_CONFIGS: Mapping[str, type[Sizes]] = {
    "next": ModelConfig,
    "each": EncoderConfig,
    "labels": EncoderConfig,
    "class": EncoderConfig,
    "pair": EncoderConfig,
    "picture": PatchEncoderConfig,
    "written": EncoderDecoderConfig,
    "recovered": ModelConfig,
}
_CLASSIFIERS = {"labels": TokenClassifier, "class": SequenceClassifier, "pair": PairClassifier}
_CROSS = "linear"  # keeps what it has read of the source in a state of constant size


@dataclass(frozen=True)
class AnsweringConfig:
    """A model for what a task asks (`polysketch.tasks.Task.asks`).

    Attributes:
        asks: "next", "each", "labels", "class", "pair", "picture", "written" or "recovered".
        sizes: a `ModelConfig`; an `EncoderConfig` for "each", "labels", "class" and "pair"; a `PatchEncoderConfig`
            for "picture"; an `EncoderDecoderConfig` for "written".
        num_classes: of "labels", "class", "pair" and "picture".
    """

    asks: str
    sizes: Sizes
    num_classes: int = 0

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        sizes = self.sizes
        return (sizes.decoder if isinstance(sizes, EncoderDecoderConfig) else sizes).vocab_size

    def build(self) -> TokenModel:
        """The model, with its initial weights."""
        sizes = self.sizes
        if isinstance(sizes, EncoderDecoderConfig):
            return TransformerEncoderDecoder(sizes)
        if isinstance(sizes, PatchEncoderConfig):
            return PatchClassifier(sizes, self.num_classes)
        if not isinstance(sizes, EncoderConfig):
            return TransformerLM(sizes) if self.asks == "next" else SequenceAutoencoder(sizes)
        if self.asks == "each":
            return MaskedLanguageModel(sizes)
        return _CLASSIFIERS[self.asks](sizes, self.num_classes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; `from_dict` gives an equal configuration back."""
        return {"asks": self.asks, "num_classes": self.num_classes, "sizes": self.sizes.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AnsweringConfig":
        """The configuration that `to_dict` described.

        Raises:
            KeyError: an entry is missing, or nothing is known that asks so.
            TypeError, ValueError: as the configurations of the models.
        """
        return cls(values["asks"], _CONFIGS[values["asks"]].from_dict(values["sizes"]), values["num_classes"])


def default_mechanism(asks: str, name: str) -> str | tuple[str, ...]:
    """The mechanism that `answering_config` takes where none is given, of every layer or layer by layer.

    Args:
        asks: see `AnsweringConfig`.
        name: of a preset.

    Raises:
        ValueError: an unknown preset, or "written", whose parts have several.
    """
    if asks == "written":
        raise ValueError(
            "expected --attention beside --attention-options, for encoder, decoder and cross-attention have mechanisms "
            "of their own, found none"
        )
    return preset_attention(name, {})[0] if _CONFIGS[asks] is ModelConfig else EncoderConfig.attention


def answering_config(
    asks: str,
    name: str,
    *,
    vocab_size: int,
    num_classes: int = 0,
    mechanism: str | tuple[str, ...] | None = None,
    options: Any = None,
    **changes: Any,
) -> AnsweringConfig:
    """Sizes of the preset `name` for what a task asks.

    A model that sees both sides has sinusoidal positions at its input unless `changes` say otherwise: rotary ones alone
    do not tell where in the row a token stands.

    Args:
        asks: see `AnsweringConfig`.
        name: of a preset.
        vocab_size, num_classes: of the task.
        mechanism: of all layers; of "written", of encoder, decoder and cross-attention, and it must be able to be each.
            By default the preset's for causal models, that of `EncoderConfig` for encoders, and for "written" these
            two, with cross-attention by "linear".
        options: of the mechanism, given or not; those of a preset's own mechanism change the preset's.
        **changes: fields of the configuration, for instance `num_layers`; those that are None are left out.

    Raises:
        ValueError: an unknown preset, mechanism or option, or a mechanism that cannot be what the model asks; those
            that can are named. Options without a mechanism for "written", whose parts have several.
    """
    changes = {"vocab_size": vocab_size, **{key: value for key, value in changes.items() if value is not None}}
    if mechanism is None and options:
        mechanism, options = _default_with(asks, name, options)
        if _CONFIGS[asks] is ModelConfig:
            changes = {EVERY: preset_fields(name).get(EVERY, 1), **changes}
    given = {} if mechanism is None else {"attention": mechanism, "attention_options": options or {}}
    if _CONFIGS[asks] is ModelConfig:
        return AnsweringConfig(asks, preset(name, **given, **changes))
    if asks != "written":
        kind = PatchEncoderConfig if asks == "picture" else EncoderConfig
        return AnsweringConfig(asks, encoder_preset(name, kind, **given, **changes), num_classes)
    cross, changes = _cross(mechanism), {"input_positions": True, **changes}
    decoder = preset(name, **given, **changes)
    changes.pop("projection_convolution", None)
    encoder = encoder_preset(name, EncoderConfig, **given, **changes)
    return AnsweringConfig(
        asks, EncoderDecoderConfig(encoder, decoder, cross, dict(options or {}) if mechanism else {})
    )


def _default_with(asks: str, name: str, options: Any) -> tuple[Any, Any]:
    """The mechanism that is not given, with these options."""
    if _CONFIGS[asks] is ModelConfig:
        return preset_attention(name, options)
    return default_mechanism(asks, name), options


def encoder_preset(name: str, kind: type[EncoderConfig] = EncoderConfig, **changes: Any) -> EncoderConfig:
    """An encoder of the sizes of the preset `name`, with sinusoidal positions at its input; `changes` are fields.

    Args:
        name: of a preset.
        kind: of configuration.
        **changes: its fields.

    Raises:
        ValueError: an unknown preset or field, or a mechanism that cannot see both sides.
    """
    fields = {key: value for key, value in preset_fields(name).items() if key not in _OF_DECODERS}
    return kind.from_dict({**fields, "input_positions": True, **changes})


_OF_DECODERS = ("attention", "attention_options", "rotary", "projection_convolution", "head_gate", EVERY)
"""What a preset says of its decoder alone."""


def _cross(mechanism: str | tuple[str, ...] | None) -> str:
    if mechanism is None:
        return _CROSS
    able = attention.mechanisms_that("is_causal", "is_bidirectional")
    if not isinstance(mechanism, str) or mechanism not in able:
        raise ValueError(
            f"expected one mechanism that can be causal, see both sides and read another sequence, found "
            f"{mechanism!r}; candidates: {', '.join(able)}"
        )
    return mechanism
