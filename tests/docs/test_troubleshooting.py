"""Every message that the page on troubleshooting quotes is one that the source can print."""

import ast
import re
from functools import cache

import pytest

from docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ANY = "\N{HORIZONTAL ELLIPSIS}"
_SHORTEST = 30  # letters of a message
_ROW = re.compile(r"^\| `(?P<message>.+?)` \| (?P<why>[^|]+) \| (?P<helps>[^|]+) \|$", re.MULTILINE)


def quoted() -> list[str]:
    """The first cell of every row."""
    return [found["message"] for found in _ROW.finditer(PAGE.read_text(encoding="utf-8"))]


@cache
def texts() -> list[str]:
    """Every string of the source, what is filled in as an ellipsis."""
    files = sorted((ROOT / "src").rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    found = {text_of(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)}
    return [text for text in found if len(text) > _SHORTEST]


def text_of(node: ast.AST) -> str:
    """A string, or parts of one that are added up."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ANY
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else ANY


def is_printed(message: str) -> bool:
    """Whether a string of the source has all words of the message, in order, and none between them."""
    pattern = re.compile(".*".join(map(re.escape, message.split(ANY))), re.DOTALL)
    first = max(message.split(ANY), key=len)
    return any(first in text and pattern.search(text) for text in texts())


def test_there_are_messages_and_every_row_says_why_and_what_helps():
    rows = re.findall(r"^\| `", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted()) == len(rows) > 20


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_source(message):
    assert is_printed(message)


def test_a_message_that_nobody_prints_is_found():
    assert is_printed("--context …: expected at least … training tokens in …, found …")
    assert not is_printed("--context …: expected at most … training tokens in …, found …")
    assert not is_printed("expected a file of no known kind whatever")
