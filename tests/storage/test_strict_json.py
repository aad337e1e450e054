"""Records that any reader of JSON can read."""

import json
import math

import pytest

from polysketch.storage import strict_json


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null_at_any_depth(number):
    value = {"a": number, "b": [1.5, (number, {"c": number})]}

    def refuse(word: str) -> None:
        raise AssertionError(f"no JSON: {word}")

    found = json.loads(strict_json.encoded(value), parse_constant=refuse)
    assert found == {"a": None, "b": [1.5, [None, {"c": None}]]}


def test_a_record_is_one_line_unless_indented():
    assert strict_json.encoded({"a": [1, 2]}).count(b"\n") == 1
    assert strict_json.encoded({"a": [1, 2]}, indent=1).count(b"\n") > 1
