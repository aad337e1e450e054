"""The experiments are run from the root of the repository, which is where Python finds them."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="session")
def command() -> Callable[..., int]:
    """A function that runs an experiment's command line and returns its exit status."""
    from experiments.study.command import run_command

    def run(experiment: object, *arguments: object) -> int:
        return run_command("experiments.foundation", experiment.run, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    """Names in random order, prepared as bytes."""
    from polysketch.data import prepare

    folder, words = tmp_path_factory.mktemp("forms"), random.Random(0)
    for split in ("train", "validation", "test"):
        (folder / "text" / split).mkdir(parents=True)
        text = " ".join(words.choice(["self", "value", "key", "query"]) for _ in range(400))
        (folder / "text" / split / "code.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text"], "bytes", folder / "prepared", progress=False)
    return folder / "prepared"


@pytest.fixture(scope="session")
def finished_forms(tmp_path_factory, data_folder, command) -> Path:
    """The --out of a comparison of three forms, of size smoke."""
    pytest.importorskip("matplotlib")
    from experiments.learning import forms_compared

    out = tmp_path_factory.mktemp("finished")
    only = ("--only", "softmax", "codes", "mixture")
    assert command(forms_compared, "--size", "smoke", "--data", data_folder, "--out", out, *only) == 0
    return out
