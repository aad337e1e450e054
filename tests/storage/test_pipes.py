"""A pipe in the place of a file is refused at once: nobody waits for what may never come."""

import os

import pytest

from polysketch.storage import FolderLock, disk

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_read", [False, True], ids=["nobody reads it", "somebody reads it"])
@pytest.mark.parametrize("write", [disk.write, disk.append], ids=["write", "append"])
def test_nothing_is_written_into_a_pipe(write, is_read, tmp_path):
    path = tmp_path / "metrics"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with pytest.raises(OSError, match=r"expected a (new )?file to write, found a pipe"):
        write(path, b"line")
    if reader is not None:
        assert os.read(reader, 10) == b""
        os.close(reader)


@pytest.mark.timeout(20)
def test_a_file_is_replaced_though_a_pipe_has_its_temporary_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    os.mkfifo(disk.temporary_name(path))
    disk.replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.timeout(20)
def test_a_pipe_is_no_lock(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ValueError, match=r"expected a lock file at .*lock, found a folder, a pipe or a device"):
        FolderLock(tmp_path / "lock").__enter__()
