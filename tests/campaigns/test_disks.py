"""Disks that fail: a few faults find nothing in ours, and find what is planted."""

import os
from pathlib import Path
from unittest import mock

import pytest
from campaigns.disks import FAULTS, NAMES, Arena, short
from campaigns.forked import TEXT, serving
from campaigns.harness import Found
from campaigns.subjects import SUBJECTS, make_given

from campaigns import disks, faulty

pytestmark = pytest.mark.skipif(faulty.why_none() is not None, reason=str(faulty.why_none()))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server whose processes can have planted faults; a function that gives the folder of what a command reads."""
    folder = tmp_path_factory.mktemp("disks")
    path = mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent))
    with path, serving((*TEXT, "planted"), faulty.preloaded(folder)) as commands:

        def given(name):
            if not (folder / name).exists():
                make_given(commands, folder / name, set(SUBJECTS[name].needs))
            return folder / name

        yield commands, given


@pytest.fixture
def found(served, tmp_path):
    """A function that lets a disk fail at some calls of a command, and gives what is found."""
    commands, given = served

    def attacked(name, kinds, planted=(), most=100, step=1):
        (tmp_path / "given").symlink_to(given(name))
        arena, subject, found = Arena(commands, tmp_path, planted), short(SUBJECTS[name]), Found()
        every = [fault for fault in arena.faults(subject) if fault[1] in kinds]
        for _, kind, call in every[:: -(-len(every) // most)][::step]:
            if not found.faults:
                arena.attack(subject, kind, call, found)
        return found

    return attacked


def test_a_command_of_the_campaign_is_one_process():
    """Of a run of several it would start one, which waits for the others or refuses its mesh."""
    assert {SUBJECTS[name].processes for name in NAMES} == {1}
    assert SUBJECTS.keys() - set(NAMES) == {"pair", "four", "compile"}


@pytest.mark.full
def test_a_campaign_draws_as_many_faults_as_it_is_told(tmp_path):
    found = disks.campaign(1, 0, tmp_path, ["task"])
    assert found.faults == []
    assert found.outcomes.pop("faults that there are") > 1
    assert found.outcomes.total() == 1


@pytest.mark.full  # tests/data and tests/training fail operations of their disks
def test_a_command_on_a_disk_that_fails_says_so_in_a_line_or_is_done(found):
    outcomes = found("task", FAULTS, most=7)
    assert outcomes.faults == []
    assert set(outcomes.outcomes) == {"task: one line", "task: done in spite of it"}


@pytest.mark.full  # tests/training fills the disk of a run
def test_a_run_on_a_full_disk_is_whole_up_to_a_checkpoint_and_goes_on(found):
    assert found("train", ("full", "short and full"), most=3).faults == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "planted", "kind", "message", "step"),
    [
        ("task", "swallowed", "I/O error", "task is another", 1),
        ("task", "unexplained", "no permission", "traceback", -1),
        ("evaluate", "half_names", "full", "is cut off", 1),
    ],
)
def test_a_planted_fault_is_found(found, command, planted, kind, message, step):
    """From the side where such calls are: the last ones of `task` give names."""
    assert message in str(found(command, (kind,), (f"planted:{planted}",), step=step).faults)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_dozens_of_faults_of_all_commands_find_nothing(tmp_path):
    assert disks.campaign(80, 5, tmp_path).faults == []
