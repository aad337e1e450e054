"""Nothing is written or deleted through a symbolic link: a folder may come from a stranger."""

from pathlib import Path

import pytest

from polysketch.storage import disk, whole_folder


@pytest.fixture
def others(tmp_path) -> Path:
    """A folder of somebody else's."""
    folder = tmp_path / "others"
    folder.mkdir()
    (folder / "thesis").write_text("all of it")
    return folder


def untouched(others: Path) -> bool:
    return [path.name for path in others.iterdir()] == ["thesis"] and (others / "thesis").read_text() == "all of it"


@pytest.mark.parametrize("place", ["itself", "inside", "deep"])
def test_deleting_a_folder_deletes_links_and_not_what_they_point_to(tmp_path, others, place):
    doomed = tmp_path / "doomed"
    link = {"itself": doomed, "inside": doomed / "link", "deep": doomed / "deep" / "link"}[place]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(others)
    disk.delete_tree(doomed)
    assert not doomed.is_symlink()
    assert not doomed.exists()
    assert untouched(others)


@pytest.mark.parametrize("write", [disk.write, disk.append], ids=["write", "append"])
def test_a_file_is_not_written_through_a_link(tmp_path, others, write):
    (tmp_path / "metrics").symlink_to(others / "thesis")
    with pytest.raises(OSError, match="found a symbolic link"):
        write(tmp_path / "metrics", b"line")
    assert untouched(others)


@pytest.mark.parametrize("name", ["config", ".config.tmp"])
def test_a_file_is_replaced_beside_a_planted_link(tmp_path, others, name):
    (tmp_path / name).symlink_to(others / "thesis")
    disk.replace_file(tmp_path / "config", b"new")
    assert (tmp_path / "config").read_bytes() == b"new"
    assert not (tmp_path / "config").is_symlink()
    assert untouched(others)


def test_what_is_another_name_of_a_file_elsewhere_is_not_written(tmp_path, others):
    """A hard link: nothing tells it from a file of this folder."""
    (tmp_path / ".config.tmp").hardlink_to(others / "thesis")
    disk.replace_file(tmp_path / "config", b"new")
    assert (tmp_path / "config").read_bytes() == b"new"
    assert untouched(others)
    (tmp_path / "piece").hardlink_to(others / "thesis")
    with pytest.raises(OSError, match="expected a new file to write, found a file of that name"):
        disk.write(tmp_path / "piece", b"new")
    assert untouched(others)


def test_a_link_in_the_place_of_a_temporary_folder_is_refused(tmp_path, others):
    (tmp_path / "empty").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "empty")
    with pytest.raises(FileExistsError, match="to be free"), whole_folder(tmp_path / "out"):
        pass
    assert not any((tmp_path / "empty").iterdir())


def test_links_in_the_leftover_of_a_killed_process_lead_nowhere(tmp_path, others):
    leftover = tmp_path / "out.partial"
    leftover.mkdir()
    (leftover / ".polysketch-lock").touch()
    (leftover / "link").symlink_to(others)
    with whole_folder(tmp_path / "out") as temporary:
        (temporary / "file").write_text("content")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert untouched(others)
