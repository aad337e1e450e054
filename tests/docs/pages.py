"""Pages as programs: their fenced blocks, in order, and how each kind is run."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polysketch import attention, cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = ("python", "bash")
NOT_CODE = ("text", "json")

_FENCE = re.compile(
    r"^(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r"<!--\s*not run:(?P<reason>.*?)-->\s*\Z", re.DOTALL)
_NEEDS = re.compile(r"<!--\s*run where (?P<variable>[A-Z_]+) is set\s*-->\s*\Z")
_ANY_MARK = re.compile(r"<!--\s*(?:not run|run where)")
_INDENTED = re.compile(r"^ {4}(?:make|polysketch|python|pip|git|TRITON_INTERPRET=1)\b.*$", re.MULTILINE)
_SHELL_SYNTAX = re.compile(r"[|&;<>$`*?~]")
_FEWEST_LETTERS = 5


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the file.
        line: number of its first line of code.
        language: what stands behind the fence.
        code: what stands in it.
        reason: why it is not run, from a comment `<!-- not run: reason -->` just before it; None where it is run.
        needs: variable of the environment without which it is left out, from `<!-- run where NAME is set -->`.
    """

    page: Path
    line: int
    language: str
    code: str
    reason: str | None
    needs: str | None

    @property
    def runs(self) -> bool:
        """Whether it is run here and now."""
        wanted = self.reason is None and self.language in RUN
        return wanted and (self.needs is None or bool(os.environ.get(self.needs)))


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, found) for found in _FENCE.finditer(text)]


def _block(page: Path, text: str, found: re.Match) -> Block:
    before = text[: found.start()]
    mark, needs = _MARK.search(before), _NEEDS.search(before)
    reason = mark["reason"].strip() if mark else None
    variable = needs["variable"] if needs else None
    return Block(page, before.count("\n") + 2, found["language"], found["code"], reason, variable)


def marks_of_nothing(page: Path) -> int:
    """How many marks do not stand just before a block, or before another mark: they would have no effect."""
    marks = len(_ANY_MARK.findall(page.read_text(encoding="utf-8")))
    return marks - sum((block.reason is not None) + (block.needs is not None) for block in blocks_of(page))


def indented_commands(page: Path) -> list[str]:
    """Commands in blocks without a fence, which nothing would run."""
    return _INDENTED.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def problem_of(block: Block) -> str | None:
    """What is wrong with a block that is neither run nor explained; None where all is well."""
    if block.reason is not None:
        return None if len(block.reason) >= _FEWEST_LETTERS else "is marked as not run without a reason"
    if block.language in RUN or block.language in NOT_CODE:
        return None
    return f"is in {block.language or 'no language'}: expected {', '.join((*RUN, *NOT_CODE))}, or a mark with a reason"


def run_page(page: Path, shorter: Mapping[str, str] | None = None) -> int:
    """Run a page's blocks from top to bottom in the current folder, its Python in one namespace.

    Args:
        page: the file.
        shorter: what to run in the place of words of the page, each of which stands there once.

    Returns:
        How many blocks there were.
    """
    namespace: dict = {"__name__": page.stem}
    blocks = [shortened(block, shorter or {}) for block in blocks_of(page) if block.runs]
    for words in shorter or {}:
        assert sum(block.code.count(words) for block in blocks_of(page) if block.runs) == 1, words
    with registry_restored():
        for block in blocks:
            _run_python(block, namespace) if block.language == "python" else _run_bash(block)
    return len(blocks)


def shortened(block: Block, shorter: Mapping[str, str]) -> Block:
    """The block with other words in some places."""
    code = block.code
    for words, others in shorter.items():
        code = code.replace(words, others)
    return replace(block, code=code)


def _run_python(block: Block, namespace: dict) -> None:
    # Empty lines before the code, so that a traceback shows the line of the page.
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), namespace)


def _run_bash(block: Block) -> None:
    for line in commands_of(block.code):
        words = shlex.split(line)
        if words[0] == "polysketch" and not _SHELL_SYNTAX.search(line):
            status = cli.main(["--traceback", *words[1:]])
        else:
            status = subprocess.run(["bash", "-euc", line], env=None, check=False).returncode
        assert status == 0, f"{block.page.name}, line {block.line}: exit status {status} of {line}"


def commands_of(code: str) -> list[str]:
    """The commands of a shell block: lines joined where one ends in a backslash, without comments."""
    joined = re.sub(r"\\\n\s*", " ", code).splitlines()
    words = [shlex.split(line, comments=True) for line in joined]
    return [line.split(" #")[0].strip() for line, found in zip(joined, words, strict=True) if found]


@contextlib.contextmanager
def registry_restored() -> Iterator[None]:
    """Forget the mechanisms that a page registers."""
    before = dict(attention.MECHANISMS)
    try:
        yield
    finally:
        attention.MECHANISMS.clear()
        attention.MECHANISMS.update(before)


def on_path() -> str:
    """The folder of the interpreter, where the commands of this installation are."""
    return str(Path(sys.executable).parent)
