"""Optional packages: one table, the same as the installation's; what is missing is named with the pip command."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from polysketch.extras import EXTRA_OF, how_to_install, require

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
OF_NO_USER = {"all", "dev", "docs", "fuzz"}
IMPORTED_AS = {"pillow": "PIL", "scikit_learn": "sklearn"}


def imported_name(requirement: str) -> str:
    """What the package of a requirement is imported as."""
    name = re.match(r"[\w-]+", requirement).group().replace("-", "_")
    return IMPORTED_AS.get(name, name)


def test_the_table_is_that_of_the_installation():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    declared = {
        imported_name(requirement): extra
        for extra, requirements in extras.items()
        if extra not in OF_NO_USER
        for requirement in requirements
        if not requirement.startswith("polysketch[")
    }
    assert declared == EXTRA_OF


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"'sentencepiece' is needed here .* 'polysketch\[sentencepiece\]'"):
        require("sentencepiece")


def test_what_a_package_itself_lacks_is_named():
    assert how_to_install("tokenizers.models").endswith("pip install 'polysketch[train]'")
    assert how_to_install("einops").endswith("'einops' is needed here and not installed: pip install 'einops'")


def test_what_is_there_is_imported():
    assert require("json") is sys.modules["json"]
