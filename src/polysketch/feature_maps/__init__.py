"""Feature maps: modules phi that linearised attention multiplies in place of queries and keys.

To add one: a file with a subclass of `FeatureMap`, and its name here; the contract tests then run on it.
"""

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.elementwise import Elementwise
from polysketch.feature_maps.focused import FocusedFeatures
from polysketch.feature_maps.gaussian_sketch import GaussianSketch
from polysketch.feature_maps.hedgehog import Hedgehog
from polysketch.feature_maps.identity import Identity
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.feature_maps.learned_sketch import LearnedSketch
from polysketch.feature_maps.low_rank_sketch import LowRankSketch
from polysketch.feature_maps.performer import PerformerFeatures
from polysketch.feature_maps.polarity import PolarityFeatures
from polysketch.feature_maps.power_sketches import PowerSketches
from polysketch.feature_maps.random_sketch import RandomSketch
from polysketch.feature_maps.sketch_products import SketchProducts
from polysketch.feature_maps.soft_codes import SoftCodes
from polysketch.feature_maps.srht_sketch import SRHTSketch
from polysketch.feature_maps.symmetric_powers import SymmetricPowers
from polysketch.feature_maps.symmetric_square import SymmetricSquare
from polysketch.feature_maps.taylor import Taylor
from polysketch.feature_maps.two_layer_network import TwoLayerNetwork

__all__ = [
    "Elementwise",
    "FeatureMap",
    "FocusedFeatures",
    "GaussianSketch",
    "Hedgehog",
    "Identity",
    "LearnedSketch",
    "LowRankSketch",
    "PerformerFeatures",
    "PolarityFeatures",
    "PowerSketches",
    "RandomSketch",
    "SRHTSketch",
    "SketchProducts",
    "SoftCodes",
    "SymmetricPowers",
    "SymmetricSquare",
    "Taylor",
    "TwoLayerNetwork",
    "lecun_normal_",
]
