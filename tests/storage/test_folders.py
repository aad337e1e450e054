"""A folder of folders appears whole or not at all, and everything in it is on the disk before it has its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polysketch.storage import disk, whole_folder


def write_into(folder: Path) -> None:
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "file").write_text("content")
    (folder / "file").write_text("content")


def test_it_appears_with_everything_in_it(tmp_path):
    with whole_folder(tmp_path / "new" / "out") as temporary:
        write_into(temporary)
        assert not (tmp_path / "new" / "out").exists()
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["new/out/deep/deeper/file", "new/out/file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_fails_leaves_nothing(tmp_path, error):
    def fail() -> None:
        with whole_folder(tmp_path / "out") as temporary:
            write_into(temporary)
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_folder_is_synced_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    done = []
    for name in ("sync", "rename"):
        operation = getattr(disk, name)
        monkeypatch.setattr(
            disk, name, lambda *paths, name=name, operation=operation: (done.append((name, paths)), operation(*paths))
        )
    with whole_folder(tmp_path / "out") as temporary:
        write_into(temporary)
    named = done.index(("rename", (temporary, tmp_path / "out")))
    inside = ["", "file", "deep", "deep/deeper", "deep/deeper/file"]
    assert {("sync", (temporary / each,)) for each in inside} <= set(done[:named])
    assert done[named + 1] == ("sync", (tmp_path,))


def test_the_leftover_of_a_killed_process_makes_way(tmp_path):
    code = (
        "import os, pathlib, sys; from polysketch.storage import whole_folder\n"
        "with whole_folder(pathlib.Path(sys.argv[1])) as temporary:\n"
        "    (temporary / 'deep').mkdir(); (temporary / 'deep' / 'old').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False).returncode == -9
    assert (tmp_path / "out.partial" / "deep" / "old").is_file()
    with whole_folder(tmp_path / "out") as temporary:
        write_into(temporary)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["deep", "file"]


def test_what_is_left_of_a_clean_up_that_is_killed_makes_way(tmp_path, monkeypatch):
    """Ctrl-C, then a kill before each deletion that comes of it: the same command can be given again."""

    class Killed(BaseException):
        pass

    left = 0

    def counted(delete):
        def deleting(*arguments, **options):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return delete(*arguments, **options)

        return deleting

    def interrupted() -> None:
        with whole_folder(tmp_path / "out") as temporary:
            write_into(temporary)
            for number in range(9):
                (temporary / f"{number}").write_text("content")
            raise KeyboardInterrupt

    kills = 0
    while True:
        with monkeypatch.context() as patched:
            left = kills
            for name in ("unlink", "rmdir"):
                patched.setattr(os, name, counted(getattr(os, name)))
            with pytest.raises((KeyboardInterrupt, Killed)) as ended:
                interrupted()
        if ended.type is KeyboardInterrupt:
            break
        kills += 1
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert list(tmp_path.iterdir()) == [], f"killed before deletion {kills}"
    assert kills >= 14, "eleven files, a lock and three folders"
