"""Window dropout: some steps see little of the window, so that what lies beyond it has to learn."""

from typing import Any

import numpy as np

from polysketch.attention.beside_window import BesideWindow
from polysketch.integrations.replacement import replaced_mechanisms

_LEFT = 8  # a step that drops its window keeps one token of so many


class WindowDropout:
    """Makes the windows of a replaced model short for some steps.

    A window answers what was said nearby. A model that has one learns to leave the rest alone, which is slower to
    learn. So in a share of the steps, which falls to zero at the end of a stage, windows have an eighth of their
    tokens. Which steps these are is a function of seed and step alone.

    Args:
        model: a transformers model with replaced attention.
        share: of the first steps.
        seed: of the draws.

    Raises:
        ValueError: windows are to be dropped, and no mechanism has one with a rest beyond it.
    """

    def __init__(self, model: Any, share: float, seed: int) -> None:
        self._share, self._seed = share, seed
        beside = [each for each in replaced_mechanisms(model).values() if isinstance(each, BesideWindow)]
        self._windows = {mechanism: mechanism.window for mechanism in beside}
        if share and not beside:
            raise ValueError(
                "--window-dropout: no mechanism of the model has a window and a rest beyond it: leave it out"
            )

    def begin_step(self, step: int, progress: float) -> None:
        """Before a step: short windows, or whole ones.

        Args:
            step: its number.
            progress: share of the stage that is over, from 0 to 1.
        """
        drawn = np.random.default_rng((self._seed, step)).random()
        short = drawn < self._share * (1.0 - progress)
        for mechanism, window in self._windows.items():
            mechanism.window = max(1, window // _LEFT) if short else window

    def end_step(self) -> None:
        """After a step: whole windows."""
        for mechanism, window in self._windows.items():
            mechanism.window = window
