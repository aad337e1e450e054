"""The parts of a transformer around attention."""

from typing import TYPE_CHECKING

from polysketch.lazy import on_demand
from polysketch.nn.names import SHORT_CONVOLUTION

if TYPE_CHECKING:
    from polysketch.nn.block import TransformerBlock
    from polysketch.nn.continued import ContinuedDocuments, DocumentPart
    from polysketch.nn.cross_attention import CrossAttention
    from polysketch.nn.embedding import sinusoidal_positions, sinusoidal_positions_on_grid
    from polysketch.nn.glu import GatedLinearUnit, gated_width
    from polysketch.nn.head_gate import HeadGate
    from polysketch.nn.mixer import TokenMixer
    from polysketch.nn.mixers import build_mixer, check_mixer, mixer_class
    from polysketch.nn.multihead_attention import MultiheadAttention
    from polysketch.nn.projection_convolution import ProjectionConvolution, ProjectionConvolutionState
    from polysketch.nn.query_key_norm import QueryKeyNorm
    from polysketch.nn.rope import Rotation, apply_rotation, rotation_at, rotation_on_grid
    from polysketch.nn.self_attention import SelfAttention
    from polysketch.nn.short_convolution import ShortConvolution, ShortConvolutionState
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "block": ["TransformerBlock"],
            "continued": ["ContinuedDocuments", "DocumentPart"],
            "cross_attention": ["CrossAttention"],
            "embedding": ["sinusoidal_positions", "sinusoidal_positions_on_grid"],
            "glu": ["GatedLinearUnit", "gated_width"],
            "head_gate": ["HeadGate"],
            "mixer": ["TokenMixer"],
            "mixers": ["build_mixer", "check_mixer", "mixer_class"],
            "multihead_attention": ["MultiheadAttention"],
            "self_attention": ["SelfAttention"],
            "projection_convolution": ["ProjectionConvolution", "ProjectionConvolutionState"],
            "query_key_norm": ["QueryKeyNorm"],
            "rope": ["Rotation", "apply_rotation", "rotation_at", "rotation_on_grid"],
            "short_convolution": ["ShortConvolution", "ShortConvolutionState"],
        },
    )

__all__ = [
    "SHORT_CONVOLUTION",
    "ContinuedDocuments",
    "CrossAttention",
    "DocumentPart",
    "GatedLinearUnit",
    "HeadGate",
    "MultiheadAttention",
    "ProjectionConvolution",
    "ProjectionConvolutionState",
    "QueryKeyNorm",
    "Rotation",
    "SelfAttention",
    "ShortConvolution",
    "ShortConvolutionState",
    "TokenMixer",
    "TransformerBlock",
    "apply_rotation",
    "build_mixer",
    "check_mixer",
    "gated_width",
    "mixer_class",
    "rotation_at",
    "rotation_on_grid",
    "sinusoidal_positions",
    "sinusoidal_positions_on_grid",
]
