"""Commands that are killed: a few attacks find nothing, and find what is planted."""

import os
import random
from pathlib import Path
from unittest import mock

import pytest
from campaigns.forked import TEXT, serving
from campaigns.harness import Found
from campaigns.kills import Arena, Stop
from campaigns.subjects import SUBJECTS, make_given

from campaigns import faulty, kills

needs_faulty_disks = pytest.mark.skipif(faulty.why_none() is not None, reason=str(faulty.why_none()))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A function that stops a training run as it is told, with a fault planted, and gives what is found."""
    folder = tmp_path_factory.mktemp("kills")
    path = mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent))
    with path, serving((*TEXT, "planted"), faulty.preloaded(folder)) as commands:
        make_given(commands, folder / "given", {"classes", "data"})
        plain = Arena(commands, folder, armed=True)
        plain.alone(SUBJECTS["train"])

        def attack(*stops, planted=None, name="train", seed=0):
            found = Found()
            arena = plain.planted(f"planted:{planted}") if planted else plain
            arena.attack(SUBJECTS[name], stops, random.Random(seed), found)
            return found.faults

        yield attack


@needs_faulty_disks
@pytest.mark.full  # distributed/test_runs.py kills a process, training/test_resume.py cuts the power
@pytest.mark.parametrize(
    "stops",
    [
        (Stop("KILL", "call", 0.2), Stop("POWER", "call", 0.5)),
        (Stop("STOP", "call", 0.3), Stop("TERM", "clock", 0.5)),
        (Stop("INT INT", "call", 0.1), Stop("POWER", "call", 0.6)),
    ],
    ids=str,
)
def test_a_run_that_is_killed_or_paused_ends_as_one_left_alone(stops, attacked):
    assert not attacked(*stops)


@pytest.mark.full
@needs_faulty_disks
def test_a_preparation_and_a_task_that_are_killed_end_as_those_left_alone(attacked):
    assert not attacked(Stop("KILL", "call", 0.6), Stop("POWER", "call", 0.9), name="prepare")
    assert not attacked(Stop("POWER", "call", 0.9), name="task")


@needs_faulty_disks
@pytest.mark.full  # distributed/test_runs.py kills two, test_pieces.py holds what is shared out
def test_a_run_of_four_of_which_one_or_all_are_stopped_ends_as_one_left_alone(attacked):
    """A resumed run shares out what copies have in common as one left alone does."""
    first_hits_one_and_second_all = 6
    stops = Stop("TERM", "call", 0.8), Stop("KILL", "call", 0.15)
    assert not attacked(*stops, name="four", seed=first_hits_one_and_second_all)


@needs_faulty_disks
@pytest.mark.full
@pytest.mark.parametrize(
    ("planted", "how", "message"),
    [
        ("no_sync", "POWER", "no config.json"),
        ("early_name", "KILL", "manifest.json"),
        ("metrics_twice", "KILL", "metrics of steps"),
    ],
)
def test_a_planted_fault_is_found(attacked, planted, how, message):
    faults = (attacked(Stop(how, "call", share), planted=planted) for share in (0.35, 0.52, 0.64, 0.78, 0.9))
    assert message in str(next(filter(None, faults), "none"))


@needs_faulty_disks
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_commands_of_every_kind_that_are_killed_end_as_those_left_alone(tmp_path):
    found = kills.campaign(40, 11, tmp_path)
    assert not found.faults
    assert len(found.outcomes) > 10
