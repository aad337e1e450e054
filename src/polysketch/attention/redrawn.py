"""Random features that are drawn anew while a model learns: the schedule, and the seed that the draws go on from."""

from polysketch.attention.base import Mechanism
from polysketch.feature_maps import FeatureMap
from polysketch.feature_maps.draws import seed_or_default
from polysketch.ops.arguments import check_at_least_one


class RedrawnFeatures(Mechanism):
    """A mechanism over features whose random weights a trainer draws anew. What decodes never draws.

    Attributes:
        feature_map: phi.
        redraw_interval: training steps between draws of the feature map's random weights; None for never. Only for maps
            whose `resample` draws from a seed of their own, saved with them.
    """

    feature_map: FeatureMap
    redraw_interval: int | None = None

    def redraw(self, step: int) -> None:
        """As `Mechanism.redraw`: the next draw of the feature map, at every multiple of `redraw_interval` but 0."""
        if self.redraw_interval is not None and step > 0 and step % self.redraw_interval == 0:
            self.feature_map.resample()


def check_interval(redraw_interval: int | None, *, is_random: bool = True, needs: str = "") -> None:
    """Refuse an interval that is none, and one for features that are not drawn.

    Args:
        redraw_interval: the option as it was given.
        is_random: whether the features are.
        needs: the option and value by which they would be.

    Raises:
        TypeError, ValueError: naming what was given.
    """
    if redraw_interval is None:
        return
    check_at_least_one(redraw_interval=redraw_interval)
    if not is_random:
        raise ValueError(f"redraw_interval={redraw_interval} is for the random sketch: it needs {needs}")


def first_seed(redraw_interval: int | None) -> int | None:
    """Of a sketch's draws, from PyTorch's default generator; None for a sketch that stays, which then saves none."""
    return None if redraw_interval is None else seed_or_default(None)
