"""What a stranger's file says cannot steer the terminal."""

import io
import sys

import pytest

from polysketch.cli.terminal import visible, write_visible

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x7f\r\u202etxt"


def test_control_characters_are_shown_escaped():
    shown = visible(HOSTILE)
    assert shown == r"\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x7f\r\u202etxt"
    assert shown.isprintable()


@pytest.mark.parametrize("text", ["plain", "naïve Ωmega 日本語 😀", "lines\n\tand tabs", "zero\u200bwidth", ""])
def test_text_stays_as_it_is(text):
    assert visible(text) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_gets_it_escaped(monkeypatch, terminal):
    """A file gets the bytes of the model."""
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    write_visible(HOSTILE)
    assert out.getvalue() == (visible(HOSTILE) if terminal else HOSTILE)
