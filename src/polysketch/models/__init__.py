"""Models made of the parts: configuration, presets, and the decoder-only language model."""

from typing import TYPE_CHECKING

from polysketch.lazy import on_demand
from polysketch.models.presets import PRESETS, preset, preset_attention, preset_fields

if TYPE_CHECKING:
    from polysketch.models.autoencoder import SequenceAutoencoder
    from polysketch.models.config import ModelConfig
    from polysketch.models.cross_entropy import token_losses
    from polysketch.models.encoder import MaskedLanguageModel, SequenceClassifier, TokenClassifier, TransformerEncoder
    from polysketch.models.encoder_config import EncoderConfig
    from polysketch.models.encoder_decoder import EncoderDecoderConfig, GivenSource, TransformerEncoderDecoder
    from polysketch.models.mean_cross_entropy import mean_token_loss
    from polysketch.models.pair_classifier import PairClassifier
    from polysketch.models.patch_encoder import PatchClassifier, PatchEncoder
    from polysketch.models.patch_encoder_config import PatchEncoderConfig
    from polysketch.models.state import ModelState
    from polysketch.models.transformer_lm import TransformerLM
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "autoencoder": ["SequenceAutoencoder"],
            "config": ["ModelConfig"],
            "cross_entropy": ["token_losses"],
            "encoder": ["MaskedLanguageModel", "SequenceClassifier", "TokenClassifier", "TransformerEncoder"],
            "encoder_config": ["EncoderConfig"],
            "encoder_decoder": ["EncoderDecoderConfig", "GivenSource", "TransformerEncoderDecoder"],
            "mean_cross_entropy": ["mean_token_loss"],
            "pair_classifier": ["PairClassifier"],
            "patch_encoder": ["PatchClassifier", "PatchEncoder"],
            "patch_encoder_config": ["PatchEncoderConfig"],
            "state": ["ModelState"],
            "transformer_lm": ["TransformerLM"],
        },
    )

__all__ = [
    "PRESETS",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "GivenSource",
    "MaskedLanguageModel",
    "ModelConfig",
    "ModelState",
    "PairClassifier",
    "PatchClassifier",
    "PatchEncoder",
    "PatchEncoderConfig",
    "SequenceAutoencoder",
    "SequenceClassifier",
    "TokenClassifier",
    "TransformerEncoder",
    "TransformerEncoderDecoder",
    "TransformerLM",
    "mean_token_loss",
    "preset",
    "preset_attention",
    "preset_fields",
    "token_losses",
]
