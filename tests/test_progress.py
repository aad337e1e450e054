"""Progress: one line, in its place on a terminal, each ten seconds elsewhere; nothing for what is soon done."""

import io

import pytest

from polysketch import progress
from polysketch.progress import Progress, format_seconds


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        """What stands in the last line, as a terminal of plain characters shows it."""
        shown: list[str] = []
        for part in self.getvalue().rpartition("\n")[2].split("\r"):
            shown[: len(part)] = part
        return "".join(shown).rstrip()


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def tell(shown: Progress, clock, seconds: int, per_second: int = 10) -> None:
    """Go on for so long, told twice a second."""
    for _ in range(2 * seconds):
        clock.now += 0.5
        shown.advance(per_second // 2)


def test_what_is_done_within_two_seconds_shows_nothing(clock):
    for stream in (Terminal(), io.StringIO()):
        with Progress("reading", 100, "tokens", stream=stream) as shown:
            tell(shown, clock, 1)
        assert stream.getvalue() == ""


def test_a_pipe_gets_a_line_each_ten_seconds_with_rate_and_time_left(clock):
    with Progress("reading", 1_000, "tokens", stream=(stream := io.StringIO())) as shown:
        tell(shown, clock, 60)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "reading  2.0 %  10 tokens/s  1:38 left"
    assert lines[1] == "reading  12.0 %  10 tokens/s  1:28 left"
    assert len(lines) == 6
    assert "\r" not in stream.getvalue()


def test_a_terminal_has_one_line_that_is_taken_away_at_the_end(clock):
    with Progress("reading", 1_000, "tokens", stream=(stream := Terminal())) as shown:
        tell(shown, clock, 50)
        assert stream.screen() == "reading  50.0 %  10 tokens/s  0:50 left"
        shown.say("a remark")
        tell(shown, clock, 10)
        assert stream.getvalue().count("\n") == 1
        assert stream.screen() == "reading  60.0 %  10 tokens/s  0:40 left"
    assert stream.screen() == ""


def test_a_line_that_becomes_shorter_leaves_nothing_behind(clock):
    shown = Progress("reading", 10_000, "tokens", stream=(stream := Terminal()))
    tell(shown, clock, 5, per_second=2)
    assert stream.screen().endswith(" left")
    clock.now += 1
    shown.update(9_999)
    assert stream.screen() == "reading  100.0 %  1,666 tokens/s  0:00 left"
    shown.close(keep=True)
    assert stream.getvalue().endswith("\n")


def test_a_line_is_no_wider_than_the_terminal(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with Progress("reading a long name", 1_000, "tokens", stream=(stream := Terminal())) as shown:
        tell(shown, clock, 5)
        assert len(stream.screen()) <= 19


def test_it_is_plain_text_for_every_terminal(clock):
    with Progress("reading", 1_000, "bytes", stream=(stream := Terminal())) as shown:
        tell(shown, clock, 30)
    assert stream.getvalue().isascii()
    assert "\x1b" not in stream.getvalue()


def test_without_a_total_there_is_a_rate_alone(clock):
    with Progress("reading", unit="bytes", stream=(stream := io.StringIO())) as shown:
        tell(shown, clock, 3, per_second=3_000_000)
    assert stream.getvalue() == "reading  3.0 MB/s\n"


def test_what_was_done_before_counts_for_the_share_and_not_for_the_rate(clock):
    with Progress("reading", 1_000, "tokens", done=500, stream=(stream := io.StringIO())) as shown:
        tell(shown, clock, 3)
    assert stream.getvalue() == "reading  52.0 %  10 tokens/s  0:48 left\n"


def test_it_can_be_switched_off(clock):
    with Progress("reading", 1_000, "tokens", enabled=False, stream=(stream := Terminal())) as shown:
        tell(shown, clock, 30)
        shown.say("a remark")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3_661, "1:01:01")])
def test_seconds_are_read_as_minutes_and_hours(seconds, text):
    assert format_seconds(seconds) == text
