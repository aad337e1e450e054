"""The parts of a transformer around attention."""

from polysketch.nn.block import TransformerBlock
from polysketch.nn.embedding import sinusoidal_positions
from polysketch.nn.glu import GatedLinearUnit, gated_width
from polysketch.nn.head_gate import HeadGate
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.mixers import SHORT_CONVOLUTION, build_mixer, check_mixer, mixer_class
from polysketch.nn.multihead import MultiHeadAttention
from polysketch.nn.projection_convolution import ProjectionConvolution, ProjectionConvolutionState
from polysketch.nn.query_key_norm import QueryKeyNorm
from polysketch.nn.rope import Rotation, apply_rotation, rotation_at
from polysketch.nn.short_convolution import ShortConvolution, ShortConvolutionState

__all__ = [
    "SHORT_CONVOLUTION",
    "GatedLinearUnit",
    "HeadGate",
    "MultiHeadAttention",
    "ProjectionConvolution",
    "ProjectionConvolutionState",
    "QueryKeyNorm",
    "Rotation",
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
    "sinusoidal_positions",
]
