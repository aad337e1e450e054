"""A server under load as a picture: speed and memory against users, memory and waiting against position."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polysketch.plotting import finish, picture, powers_of_two

__all__ = ["plot_serving"]

Cell = dict[str, Any]


def plot_serving(record: dict[str, Any], title: str, path: Path) -> None:
    """Draw what `measure_serving` found.

    Args:
        record: that it gave.
        title: of the whole picture: machine, dtype, commit.
        path: its suffix (.png, .pdf, .svg) gives the format.

    Raises:
        ImportError: no matplotlib; it comes with the extra `plot`.
    """
    cells = [cell for cell in record["load"] if "left_out" not in cell]
    shortest, longest = (end(cell["prompt"] for cell in record["load"]) for end in (min, max))
    with picture(path, (13, 8), rows=2, columns=2, title=title, dpi=120) as ((speed, memory), (states, waiting)):
        for prompt, style in ((shortest, "-"), (longest, "--")):
            at = [cell for cell in cells if cell["prompt"] == prompt]
            _lines(speed, at, "users", lambda cell: cell["tokens_per_second"], style, f", prompts of {prompt:,}")
            _lines(memory, at, "users", lambda cell: _mega(cell["server_bytes"]), style, f", prompts of {prompt:,}")
        _label(speed, record["load"], "users", "users at the same time", "tokens per second, all users")
        _label(memory, record["load"], "users", "users at the same time", "memory of the server, MB")
        alone = [
            {**cell, "state": cell["state_bytes"] and cell["state_bytes"] / cell["users"]} for cell in record["load"]
        ]
        one = [cell for cell in alone if cell["users"] == min(cell["users"] for cell in alone)]
        _lines(states, one, "prompt", lambda cell: _mega(cell["state"]), "-")
        _label(states, record["load"], "prompt", "tokens of the prompt", "state of a user by formula, MB")
        _lines(waiting, record["reading"], "prompt", lambda cell: _median(cell["first_token"]), "-", ", new prompt")
        _lines(
            waiting,
            record["reading"],
            "prompt",
            lambda cell: _median(cell["first_token_of_next_turn"]),
            "--",
            ", next turn",
        )
        _label(waiting, record["reading"], "prompt", "tokens of the prompt", "seconds to the first token")


def _lines(
    axes: Any, cells: Sequence[Cell], along: str, value: Callable[[Cell], float | None], style: str, what: str = ""
) -> None:
    """A line for each series; the same one has the same colour in every panel."""
    for number, name in enumerate(dict.fromkeys(cell["series"] for cell in cells)):
        points = [(cell[along], value(cell)) for cell in cells if cell["series"] == name]
        drawn = sorted((place, height) for place, height in points if height is not None)
        if drawn:
            axes.plot(*zip(*drawn, strict=True), style, marker="o", color=f"C{number}", label=f"{name}{what}")


def _label(axes: Any, cells: Sequence[Cell], along: str, where: str, what: str) -> None:
    powers_of_two(axes, sorted({cell[along] for cell in cells}))
    axes.set_yscale("log")
    finish(axes, legend=bool(axes.get_lines()), xlabel=where, ylabel=what)


def _mega(size: float | None) -> float | None:
    return None if size is None else size / 1e6


def _median(spread: dict[str, float] | None) -> float | None:
    return None if spread is None else spread["median"]
