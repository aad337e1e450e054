"""Depthwise convolutions over tokens: causal with a tail for decoding, centred, and two-dimensional over a grid."""

from polysketch.ops.convolution.api import causal_convolution, causal_convolution_backend, centred_convolution
from polysketch.ops.convolution.grid import depthwise_convolution_2d

__all__ = ["causal_convolution", "causal_convolution_backend", "centred_convolution", "depthwise_convolution_2d"]
