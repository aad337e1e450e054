"""The computation of the learned sketch (PolySketchFormer, Algorithm 2); its parameters live in `feature_maps`."""

from polysketch.ops.learned_sketch.api import learned_sketch, learned_sketch_backend

__all__ = ["learned_sketch", "learned_sketch_backend"]
