"""Every name that the page on mathematics gives is there."""

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "mathematics.md"
NAME = re.compile(r"`((?:ops|feature_maps|attention|evaluation|nn)\.\w+)`")


def test_the_names_of_the_page_exist_and_every_mechanism_is_among_them():
    names = NAME.findall(PAGE.read_text())
    missing = [name for name in names if not _exists(*name.split("."))]
    assert missing == []
    attention = importlib.import_module("polysketch.attention")
    classes = {f"attention.{kind.__name__}" for kind in attention.MECHANISMS.values()}
    assert classes <= set(names)


def _exists(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(f"polysketch.{module}"), name)
