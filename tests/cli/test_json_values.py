"""Values of JSON are taken where the annotation has them, and nowhere else."""

from typing import Any, Literal

import pytest

from polysketch.cli.json_values import fits


@pytest.mark.parametrize(
    ("annotation", "taken", "refused"),
    [
        (int, [0, -3], [1.0, True, "1", None, [1]]),
        (float, [1, 1.5], [True, "1.5", None]),
        (bool, [True, False], [0, "true"]),
        (str, ["", "a"], [1, None, ["a"]]),
        (int | None, [None, 4], ["none", 1.5]),
        (tuple[int, ...], [[], [1, 2]], [5, [1.5], ["a"], {"a": 1}]),
        (tuple[int, int], [[1, 2]], [[1], [1, 2, 3], [1, "a"]]),
        (dict[str, Any], [{}, {"a": 1}], [3, [], "a"]),
        (Literal["code", "books"], ["books"], ["prose", 1]),
    ],
)
def test_what_fits_is_taken_and_all_else_refused(annotation, taken, refused):
    assert all(fits(value, annotation) for value in taken)
    assert not any(fits(value, annotation) for value in refused)
