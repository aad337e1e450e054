"""Feature maps: modules phi that linearised attention multiplies in place of queries and keys."""

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.elementwise import Elementwise
from polysketch.feature_maps.gaussian_sketch import GaussianSketch
from polysketch.feature_maps.identity import Identity
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.feature_maps.learned_sketch import LearnedSketch
from polysketch.feature_maps.performer import PerformerFeatures

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "identity": Identity,
    "gaussian-sketch": GaussianSketch,
    "learned-sketch": LearnedSketch,
    "elementwise": Elementwise,
    "performer": PerformerFeatures,
}

__all__ = [
    "FEATURE_MAPS",
    "Elementwise",
    "FeatureMap",
    "GaussianSketch",
    "Identity",
    "LearnedSketch",
    "PerformerFeatures",
    "lecun_normal_",
]
