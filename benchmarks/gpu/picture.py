"""One picture of everything that was timed: time per token against length, on logarithmic axes."""

from pathlib import Path
from typing import Any

from benchmarks.journal import Journal
from polysketch.benchmarking.plot import plot_time_per_token


def draw(journal: Journal, title: str) -> Path | None:
    """Beside the journal's file; None, with the reason printed, without matplotlib or without times."""
    path = journal.path.with_suffix(".png")
    try:
        plot_time_per_token(measurements(journal), title, path)
    except (ImportError, ValueError) as error:
        print(f"no picture: {error}")
        return None
    return path


def measurements(journal: Journal) -> list[dict[str, Any]]:
    """Records of times as a picture wants them."""
    attention = [
        _point(one, _panel(one), one["series"], one["batch"] * one["length"], length=one["length"])
        for one in sorted(journal.of("time"), key=lambda one: (one["direction"], one["batch"] == 1))
    ]
    training = [
        _point(one, "training step of gpt2-small", one["model"], one["batch"] * one["length"], length=one["length"])
        for one in journal.of("train")
    ]
    decoding = [
        _point(one, _decoding_panel(one), one["model"], one["rows"], position=one["position"])
        for one in sorted(journal.of("decode"), key=lambda one: one["largest"])
    ]
    return attention + training + decoding


def _point(one: dict[str, Any], direction: str, series: str, tokens: int, **place: int) -> dict[str, Any]:
    times = {"seconds": one["seconds"], "floor_seconds": one["floor_seconds"]}
    return {"direction": direction, "series": series, "tokens": tokens, **times, **place}


def _panel(one: dict[str, Any]) -> str:
    return f"{one['direction']}, {'one sequence' if one['batch'] == 1 else 'tokens held constant'}"


def _decoding_panel(one: dict[str, Any]) -> str:
    return f"decoding with gpt2-small, {'largest batch that fits' if one['largest'] else 'batch 1'}"
