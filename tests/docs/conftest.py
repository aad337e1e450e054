"""A folder to run pages in: the clone's sources, and the data and the run that the README makes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from docs.pages import ROOT, on_path, run_page

SHARED = ("src", "docs", "examples")
SHORTER = {
    "--steps 20 ": "--steps 2 ",
    "--context 4096 --max-tokens 16384": "--context 1024 --max-tokens 4096",
    "--lengths 1024 4096": "--lengths 256 512",
}
"""The same commands of the README with smaller numbers."""


@pytest.fixture(scope="session")
def readme_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README was run, once, from top to bottom, with smaller numbers: holds data/own and runs/own."""
    folder = tmp_path_factory.mktemp("readme")
    with inside(folder):
        assert run_page(ROOT / "README.md", SHORTER) > 0
    return folder


@pytest.fixture
def page_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """A function that goes to an empty folder for a page: links to the clone's sources, and, where the page mentions
    them, to the README's data/own and runs/own."""
    with contextlib.ExitStack() as entered:

        def enter(page: Path) -> None:
            text = page.read_text(encoding="utf-8")
            for kind in ("data", "runs"):
                if f"{kind}/own" in text:
                    readme: Path = request.getfixturevalue("readme_folder")
                    (tmp_path / kind).mkdir()
                    (tmp_path / kind / "own").symlink_to(readme / kind / "own")
            entered.enter_context(inside(tmp_path))

        yield enter


class inside:
    """In a folder, offline, with the commands of this installation first on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for name in SHARED:
            (self._folder / name).symlink_to(ROOT / name)
        self._patch.chdir(self._folder)
        self._patch.setenv("PATH", f"{on_path()}{os.pathsep}{os.environ['PATH']}")
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            self._patch.setenv(name, "1")

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
