"""A run folder belongs to one process, and to none when that is gone."""

import os
import signal
import subprocess
import sys

import pytest

from polysketch.training.lock import RunLock

HOLDER = """
import sys, time
sys.path.insert(0, {path!r})
import lock, pathlib
with lock.RunLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    import polysketch.training.lock as module

    code = HOLDER.format(path=os.path.dirname(module.__file__))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run" / "lock")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path, holder):
    with pytest.raises(RuntimeError, match=rf"in use by process {holder.pid} on .*another --out"):
        RunLock(tmp_path / "run" / "lock").__enter__()


def test_the_lock_dies_with_its_process(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path / "run" / "lock"):
        pass


def test_it_can_be_taken_again_after_it_was_released(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path / "lock"), pytest.raises(RuntimeError, match="in use"):
            RunLock(tmp_path / "lock").__enter__()
