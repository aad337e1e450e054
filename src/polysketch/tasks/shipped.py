"""Data sets that come with a package."""

from __future__ import annotations

import numpy as np

from polysketch.extras import require
from polysketch.tasks.images import PIXELS
from polysketch.tasks.stored import Classification, ClassifiedRows

_BRIGHTEST = 16
_OF_TEST = 5  # every fifth picture


def digits(patch_size: int | None = None) -> Classification:
    """Handwritten digits of 8 x 8 pixels, the 1,797 that scikit-learn ships: every fifth is for testing.

    They are the test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998), brightness from 0
    to 16, which is 0 to 255 here.

    Args:
        patch_size: pixels of a side of a patch, for models that take a patch for a token.

    Raises:
        ImportError: scikit-learn is missing; the message has the pip command.
        ValueError: patches that do not divide them.
    """
    found = require("sklearn.datasets").load_digits()
    pixels = np.round(found.data * (255 / _BRIGHTEST)).astype(np.int64)
    tested = np.arange(len(pixels)) % _OF_TEST == 0
    splits = {
        split: ClassifiedRows.of(list(pixels[chosen]), found.target[chosen].tolist())
        for split, chosen in (("train", ~tested), ("test", tested))
    }
    return Classification(splits, 256, list(map(str, range(10))), (8, 8, 1), PIXELS, patch_size=patch_size)
