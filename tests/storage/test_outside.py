"""Small files that others wrote: whatever is in them, one line says what was expected, and nothing is waited for."""

import os

import pytest

from polysketch.storage import outside


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{", b"[" * 100_000, b"9" * 5000, b'{"a": ' * 5000])
def test_what_is_no_json_is_told_in_one_line(tmp_path, content):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"expected JSON in .*file\.json, found something else") as refusal:
        outside.read_json(tmp_path / "file.json")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"[]", b"7", b"null", b'{"one": 1}'])
def test_an_object_has_the_names_that_are_needed(tmp_path, content):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.json: expected an object"):
        outside.read_object(tmp_path / "file.json", "one", "two")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "file.json")
    with pytest.raises(ValueError, match="found a pipe or a device"):
        outside.read_json(tmp_path / "file.json")


def test_a_file_of_terabytes_is_not_read(tmp_path):
    with (tmp_path / "file.json").open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(ValueError, match=r"expected at most 1,073,741,824 bytes in .*file\.json, found 4,398,"):
        outside.read_json(tmp_path / "file.json")
