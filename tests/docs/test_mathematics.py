"""Every name that the page on mathematics gives is there, and the site's page has every mechanism."""

import importlib
import re
from pathlib import Path

import pytest

from polysketch import attention

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "mathematics.md"
CODE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->", re.DOTALL)
FORMULA = re.compile(r"(\${1,2})(?!\s)(.+?)(?<!\s)\1", re.DOTALL)
NAME = re.compile(r"`((?:ops|feature_maps|attention|evaluation|nn)\.\w+)`")


def test_the_names_of_the_page_exist():
    names = NAME.findall(PAGE.read_text())
    assert len(names) > 40
    assert [name for name in names if not _exists(*name.split("."))] == []


def test_the_sites_page_has_a_row_for_every_mechanism(hooks):
    assert hooks.EVERY_MECHANISM in PAGE.read_text()
    table = hooks.mechanism_table()
    for name, kind in attention.MECHANISMS.items():
        assert f"| `{name}` | `attention.{kind.__name__}` | " in table
    assert all(row.count(" | ") == 2 for row in table.splitlines() if not row.startswith("|-"))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("hooks")


def test_every_formula_is_typeset(hooks):
    """A word of TeX that is not known would stay, with its backslash."""
    formulas = [tex for _, tex in FORMULA.findall(CODE.sub("", PAGE.read_text()))]
    assert len(formulas) > 100
    assert [tex for tex in formulas if not _is_typeset(hooks.typeset(tex, block=False))] == []
    assert not _is_typeset(hooks.typeset(r"\unknown{x}", block=False))


def test_what_is_marked_as_a_formula_becomes_one_and_nothing_else_does(hooks):
    marked = r'<p><span class="arithmatex">\(a &lt; b\)</span> <div class="arithmatex">\[\frac{a}{b}\]</div> \(c\)</p>'
    made = hooks.on_page_content(marked, None, None, None)
    assert made.count("<math") == 2
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">' in made
    assert "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>" in made
    assert r" \(c\)</p>" in made


def test_no_page_but_this_one_has_dollars_that_would_be_read_as_formulas():
    """A price, or a variable of the shell, outside of code."""
    others = [page for page in DOCS.glob("*.md") if page != PAGE]
    assert [page.name for page in others if FORMULA.search(CODE.sub("", page.read_text()))] == []


def _is_typeset(mathml: str) -> bool:
    return mathml.startswith("<math") and "\\" not in mathml


def _exists(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(f"polysketch.{module}"), name)
