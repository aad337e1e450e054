"""Pictures: written whole or not at all, and every axis says what it shows."""

import contextlib
import errno

import pytest

from polysketch import plotting


@pytest.mark.parametrize("suffix", plotting.SUFFIXES)
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"picture{suffix}"
    with plotting.picture(file, title="a title") as axes:
        axes.plot([1, 2], [3, 4], label="a line")
        plotting.finish(axes, xlabel="tokens", ylabel="seconds")
    assert file.stat().st_size > 1_000


def test_an_error_while_drawing_leaves_the_old_picture(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "picture.svg").write_text("old")

    def draw() -> None:
        with plotting.picture(tmp_path / "picture.svg", rows=2, columns=3) as axes:
            assert axes.shape == (2, 3)
            raise RuntimeError("deliberately broken")

    with pytest.raises(RuntimeError, match="deliberately broken"):
        draw()
    assert (tmp_path / "picture.svg").read_text() == "old"


def test_a_disk_that_is_full_leaves_the_old_picture(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    file = tmp_path / "picture.png"
    file.write_text("old")

    def half(self, target, **options):
        with contextlib.nullcontext(target) if hasattr(target, "write") else open(target, "wb") as opened:
            opened.write(b"half a picture")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(OSError, match="No space left"), plotting.picture(file) as axes:
        axes.plot([1, 2], [3, 4])
    assert file.read_text() == "old"


def test_the_axes_of_positions_are_named_and_reach_the_last_edge(tmp_path):
    pytest.importorskip("matplotlib")
    with plotting.picture(tmp_path / "picture.svg") as axes:
        axes.stairs([3.0, 2.0], [0, 8, 1_024], label="a loss")
        plotting.loss_by_position(axes, [0, 8, 1_024])
    drawn = (tmp_path / "picture.svg").read_text()
    assert all(
        text in drawn for text in ("<!-- position in the context (tokens) -->", "<!-- 1,024 -->", "<!-- a loss -->")
    )
