"""Every command and snippet of the README and the pages runs, from top to bottom; what does not run says why."""

import dataclasses
import re
import shlex
import typing
from importlib import import_module
from pathlib import Path

import pytest

from docs.conftest import inside
from docs.pages import PAGES, ROOT, blocks_of, commands_of, indented_commands, marks_of_nothing, problem_of, run_page
from polysketch import cli
from polysketch.data.corpus import RECIPES

OTHERS = [page for page in PAGES if page.name != "README.md"]
CODE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->", re.DOTALL)
TAG = re.compile(r"<[A-Za-z/].*")
INLINE = re.compile(r"(?<!`)`(polysketch [a-z][^`]*)`(?!`)", re.DOTALL)


def name_of(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page):
    problems = [(block.line, problem_of(block)) for block in blocks_of(page)]
    assert [found for found in problems if found[1]] == []
    assert indented_commands(page) == []
    assert marks_of_nothing(page) == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_formula_is_a_tag(page):
    """A browser would swallow <q, k>; write ⟨q, k⟩."""
    assert TAG.findall(CODE.sub("", page.read_text(encoding="utf-8"))) == []


def test_the_readme_runs(readme_folder):
    assert (readme_folder / "data/own/description.json").exists()
    assert (readme_folder / "runs/own/metrics.jsonl").exists()


@pytest.mark.full
def test_the_readme_runs_as_it_stands(tmp_path):
    with inside(tmp_path):
        assert run_page(ROOT / "README.md") > 0


RUN = [page for page in OTHERS if any(not block.reason for block in blocks_of(page))]
LONG = (
    "index.md",
    "distributed.md",
    "evaluating.md",
    "replacing-attention.md",
    "datasets.md",
    "huggingface.md",
    "own-loop.md",
    "vision.md",
    "training.md",
    "generation.md",
    "tasks.md",
)  # three minutes together; the README prepares, trains, evaluates and generates


# PyTorch's own, as it reads its formulas of forward mode for the first time.
@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page.name in LONG)) for page in RUN], ids=map(name_of, RUN)
)
def test_a_page_runs_from_top_to_bottom(page, page_folder):
    page_folder(page)
    run_page(page)


def typed_commands() -> list[tuple[str, str]]:
    """Commands of this library that stand in a sentence or in a block that is not run."""
    found = []
    for page in PAGES:
        unrun = [block.code for block in blocks_of(page) if block.reason and block.language == "bash"]
        commands = [command for code in unrun for command in commands_of(code)] + INLINE.findall(page.read_text())
        found += [(page.name, " ".join(command.split())) for command in commands if command.startswith("polysketch ")]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "command"), typed_commands())
def test_a_command_that_is_not_run_is_one_that_the_command_line_has(page, command):
    """Its verb and its flags exist."""
    _, verb, *arguments = shlex.split(command)
    assert verb in cli.VERBS, f"{page}: {command}"
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert flags <= flags_of(verb, arguments) | {"--help"}, f"{page}: {command}"


def flags_of(verb: str, arguments: list[str]) -> set[str]:
    """The flags of a verb, or of a benchmark."""
    run = cli.function_of(verb)
    if verb == "benchmark" and arguments and not arguments[0].startswith("-"):
        run = import_module("polysketch.cli.benchmark").BENCHMARKS[arguments[0]]
    fields = dataclasses.fields(next(iter(typing.get_type_hints(run).values())))
    return {f"--{no}{field.name.replace('_', '-')}" for field in fields for no in ("", "no-")}


def test_the_table_of_datasets_is_that_of_the_recipes():
    rows = re.findall(
        r"^\| `([\w-]+)` \| `([^`]+)` \| (?:`([\w-]+)`)? *\| `(\w+)` \| ([^|]+) \|$",
        page_text("datasets"),
        re.MULTILINE,
    )
    assert {name: values for name, *values in rows} == {
        name: [recipe.hub_name, recipe.config or "", recipe.text_field, ", ".join(recipe.splits)]
        for name, recipe in RECIPES.items()
    }


def page_text(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nx\n```\n", None),
        ("```\nx\n```\n", "no language"),
        ("```rust\nx\n```\n", "rust"),
        ("<!-- not run: needs a network -->\n```bash\nx\n```\n", None),
        ("<!-- run where NO_SUCH_NAME is set -->\n```python\n1 / 0\n```\n", None),
        ("<!-- not run: -->\n```bash\nx\n```\n", "without a reason"),
        ("<!-- not run: needs a network -->\nA sentence.\n\n```\nx\n```\n", "no language"),
    ],
)
def test_a_block_that_is_neither_run_nor_explained_is_found(tmp_path, text, problem):
    (tmp_path / "page.md").write_text(text)
    (block,) = blocks_of(tmp_path / "page.md")
    assert not block.runs or block.code == "x\n"
    found = problem_of(block)
    assert found is None if problem is None else problem in found


def test_a_page_that_is_wrong_fails_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_page(tmp_path / "page.md")
    assert caught.traceback[-1].lineno + 1 == 8
    for command in ("false", "polysketch evaluate nowhere"):
        (tmp_path / "page.md").write_text(f"```bash\n{command}\n```\n")
        with pytest.raises((AssertionError, FileNotFoundError)):
            run_page(tmp_path / "page.md")
