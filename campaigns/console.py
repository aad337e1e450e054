"""The console script `polysketch`, whose server ends as soon as it is ready: `python -P console.py serve run`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def script() -> int:
    """The command with the words of `sys.argv`."""
    if sys.argv[1:2] == ["serve"]:
        _serve_nobody()
    from polysketch.cli import main

    return main()


def start_anew(words: Sequence[str]) -> NoReturn:
    """Python begins again in this process, as it does when somebody types the command.

    Args:
        words: what is typed after `polysketch`.
    """
    import polysketch

    path = os.pathsep.join(filter(None, (str(Path(polysketch.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONPATH"] = path
    os.execv(sys.executable, [sys.executable, "-P", __file__, *words])


def _serve_nobody() -> None:
    from polysketch.serving import running

    running.run_app = lambda app, listening, *, grace, ready: ready()  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(script())
