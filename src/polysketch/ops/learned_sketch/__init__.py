"""The computation of the learned sketch (PolySketchFormer, Algorithm 2); its parameters live in `feature_maps`."""

from polysketch.ops.learned_sketch.activations import ACTIVATIONS, check_activation
from polysketch.ops.learned_sketch.api import learned_sketch, learned_sketch_backend, learned_sketches
from polysketch.ops.learned_sketch.networks import PAPER_ACTIVATION, PAPER_DEPTH

__all__ = [
    "ACTIVATIONS",
    "PAPER_ACTIVATION",
    "PAPER_DEPTH",
    "check_activation",
    "learned_sketch",
    "learned_sketch_backend",
    "learned_sketches",
]
