"""Nothing that a command prints can steer a terminal, wherever it came from; bars can move on their line."""

import io
import json
import sys

from polysketch.cli import main
from polysketch.cli.terminal import visible_streams


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self):
        return True


def terminal_of(monkeypatch) -> Terminal:
    """In a test, not in a fixture: pytest gives each its own streams."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_a_summary_of_a_stranger_is_shown_escaped(monkeypatch, tmp_path):
    terminal = terminal_of(monkeypatch)
    (tmp_path / "reversal-x").mkdir()
    counts = dict.fromkeys(("runs", "rows", "own_rows", "of_rows"), 1)
    texts = {"study": "reversal", "size": "\x1b[2J", "told": "\x1b7", "ours": "\x9b31m\u202e"}
    summary = {**counts, **texts, "papers": {"\x1bc": "\x1b8"}, "holds": True}
    (tmp_path / "reversal-x" / "summary.json").write_text(json.dumps(summary))
    assert main(["study", "--list", "--results", str(tmp_path)]) == 0
    assert all(text in terminal.getvalue() for text in (r"\x1b[2J", r"\x1b7", r"\x1bc", r"\x1b8"))
    assert not {"\x1b", "\x9b", "\u202e"} & set(terminal.getvalue())


def test_bars_move_and_a_carriage_return_inside_a_text_does_not(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with visible_streams():
        print("\r 3 of 7", end="", file=sys.stderr)
        print("\r        ", end="\r")
        print("a name\rof another", flush=True)
    print("\x1b")
    assert terminal.getvalue() == "\r 3 of 7\r        \ra name\\rof another\n\x1b\n"


def test_colours_are_left_out_and_all_else_of_the_kind_is_shown(monkeypatch):
    """Those of a tracker would be noise; the sequence in the second line clears the screen."""
    terminal = terminal_of(monkeypatch)
    with visible_streams():
        print("\x1b[34m\x1b[1mwandb\x1b[0m: run")
        print("\x1b[2J \x1b[3")
    assert terminal.getvalue() == "wandb: run\n\\x1b[2J \\x1b[3\n"


def test_into_a_pipe_text_goes_as_it_is(capsys):
    with visible_streams():
        print("\x1b[2J")
    assert capsys.readouterr().out == "\x1b[2J\n"
