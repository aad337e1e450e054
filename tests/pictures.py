"""Fixtures for folders of tests that make pictures: pixels are computed for those alone that look at them."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def no_pixels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Pictures get all that is drawn into them; layout and pixels take most of the time of a small run."""
    if "pixels" not in request.fixturenames and importlib.util.find_spec("matplotlib"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: file.write(b"none"))


@pytest.fixture
def pixels() -> None:
    """Ask for pictures as they are."""
    pytest.importorskip("matplotlib")
