"""Every name that the page on mathematics gives is there, and the site's page has every mechanism."""

import importlib
import re
from pathlib import Path

import pytest

from polysketch import attention

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "mathematics.md"
NAME = re.compile(r"`((?:ops|feature_maps|attention|evaluation|nn)\.\w+)`")


def test_the_names_of_the_page_exist():
    names = NAME.findall(PAGE.read_text())
    assert len(names) > 40
    assert [name for name in names if not _exists(*name.split("."))] == []


def test_the_sites_page_has_a_row_for_every_mechanism(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS))
    hooks = importlib.import_module("hooks")
    assert hooks.EVERY_MECHANISM in PAGE.read_text()
    table = hooks.mechanism_table()
    for name, kind in attention.MECHANISMS.items():
        assert f"| `{name}` | `attention.{kind.__name__}` | " in table
    assert all(row.count(" | ") == 2 for row in table.splitlines() if not row.startswith("|-"))


def _exists(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(f"polysketch.{module}"), name)
