"""An object that carries its own digest: damage to it is found."""

import json

import pytest

from polysketch.storage.sealed import sealed, unsealed

VALUES = {"a": 1, "b": {"c": [0.1, None, "ü"]}, "d": -1e-300}


def test_it_comes_back_as_it_was_in_any_order_of_names():
    written = json.loads(json.dumps(sealed(VALUES)))
    assert unsealed(dict(reversed(written.items())), "file") == VALUES


@pytest.mark.parametrize("change", [{"a": 2}, {"b": {"c": [0.1, None, "u"]}}, {"more": 1}, {"sha256": "0"}], ids=str)
def test_what_was_changed_is_refused(change):
    with pytest.raises(ValueError, match="file: expected the content that its own sha256 states"):
        unsealed({**sealed(VALUES), **change}, "file")


@pytest.mark.parametrize("name", ["sha25", "rha256", "x"])
def test_another_name_for_the_digest_does_not_make_it_an_object_without_one(name):
    changed = {name if key == "sha256" else key: value for key, value in sealed(VALUES).items()}
    with pytest.raises(ValueError, match="file: expected the content that its own sha256 states"):
        unsealed(changed, "file")


def test_an_object_of_earlier_versions_has_no_digest():
    assert unsealed(dict(VALUES), "file") == VALUES
