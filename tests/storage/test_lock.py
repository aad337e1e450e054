"""A folder belongs to one process, and to none when that is gone."""

import os
import signal
import subprocess
import sys

import pytest

from polysketch.storage import FolderLock

HOLDER = """
import sys, time
sys.path.insert(0, {path!r})
import lock, pathlib
with lock.FolderLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    import polysketch.storage.lock as module

    code = HOLDER.format(path=os.path.dirname(module.__file__))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run" / "lock")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path, holder):
    with pytest.raises(RuntimeError, match=rf"in use by process {holder.pid} on .*another --out"):
        FolderLock(tmp_path / "run" / "lock").__enter__()


def test_the_lock_dies_with_its_process(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with FolderLock(tmp_path / "run" / "lock"):
        pass


def test_it_can_be_taken_again_after_it_was_released(tmp_path):
    for _ in range(2):
        with FolderLock(tmp_path / "lock"), pytest.raises(RuntimeError, match="in use"):
            FolderLock(tmp_path / "lock").__enter__()


WINDOWS = """
import errno, pathlib, sys, types
held = set()

def locking(descriptor, mode, size):
    import os
    file = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR), size
    if file in held:
        raise PermissionError(errno.EACCES, "Permission denied")
    held.add(file)

sys.modules["fcntl"] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
from polysketch.storage import FolderLock
path = pathlib.Path(sys.argv[1])
with FolderLock(path):
    try:
        FolderLock(path).__enter__()
    except RuntimeError as error:
        print(error)
"""


def test_where_there_is_no_flock_a_byte_beyond_the_text_is_locked(tmp_path):
    """Windows, acted out: the module imports, the byte is the same for all, and the holder can still be read."""
    result = subprocess.run(
        [sys.executable, "-c", WINDOWS, str(tmp_path / "lock")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "in use by process" in result.stdout


@pytest.mark.skipif(os.name == "nt", reason="folders are locked by flock")
def test_whoever_deletes_the_lock_file_is_refused_all_the_same(tmp_path, holder):
    (tmp_path / "run" / "lock").unlink()
    with pytest.raises(RuntimeError, match="in use by another process"):
        FolderLock(tmp_path / "run" / "lock").__enter__()


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_untouched(tmp_path):
    (tmp_path / "letters").write_text("dear")
    (tmp_path / "lock").symlink_to(tmp_path / "letters")
    with pytest.raises(ValueError, match="found a symbolic link"):
        FolderLock(tmp_path / "lock").__enter__()
    assert (tmp_path / "letters").read_text() == "dear"
