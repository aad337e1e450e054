"""The parts of a transformer around attention."""

from polysketch.nn.block import TransformerBlock
from polysketch.nn.embedding import sinusoidal_positions
from polysketch.nn.glu import GatedLinearUnit, gated_width
from polysketch.nn.multihead import MultiHeadAttention
from polysketch.nn.rope import Rotation, apply_rotation, rotation_at

__all__ = [
    "GatedLinearUnit",
    "MultiHeadAttention",
    "Rotation",
    "TransformerBlock",
    "apply_rotation",
    "gated_width",
    "rotation_at",
    "sinusoidal_positions",
]
