"""The experiments are run from the root of the repository, which is where Python finds them."""

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
        return run_command("experiments", experiment.run, [str(argument) for argument in arguments])

    return run
