"""`polysketch benchmark serving`: what is measured, and its tables."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from polysketch.benchmarking.settings import ServingSettings, check_positive
from polysketch.benchmarking.tables import Row, megabytes, print_table, print_text
from polysketch.cli.benchmark.common import (
    Steps,
    machine_line,
    picture_title,
    print_busy,
    write_record,
)
from polysketch.cli.output_files import check_folder, check_plot

__all__ = ["ServingFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class ServingFlags(ServingSettings):
    """Put a server under load over HTTP: users at the same time, long prompts, and a long prompt beside users.

    The server is `polysketch serve` with random weights, in a process of its own, for each mechanism; or any other one
    with OpenAI's interface (`--url`). Time to the first token and between tokens are those that a client sees. Prompts
    of a cell begin with the same tokens, which are read once, so that many users are soon at a long position.

    On two cores, in about ten minutes:

    polysketch benchmark serving --threads 1 --out serving.json --plot serving.png
    """

    threads: int | None = None
    """that the server computes with; default: PyTorch's choice"""
    json: bool = False
    """print everything as one JSON object on the last line: machine, versions, commit, settings, every figure"""
    out: Path | None = None
    """write that JSON object to this file"""
    plot: Path | None = None
    """write a plot of speed, memory and waiting to this file (.png, .pdf or .svg)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(**{"--threads": 1 if self.threads is None else self.threads})


def run(flags: ServingFlags) -> int:
    """Measure as the flags say, print the tables, and return the exit status."""
    check_plot(flags.plot)
    check_folder(flags.out, "--out")
    settings = ServingSettings(**{field.name: getattr(flags, field.name) for field in fields(ServingSettings)})
    settings.check_names()  # before PyTorch is loaded
    if settings.url is None:
        from polysketch.extras import require

        for package in ("starlette", "uvicorn"):
            require(package)
    from polysketch.benchmarking import measure_serving

    found = measure_serving(settings, flags.threads, Steps(settings.num_steps))
    print_text(machine_line(found["environment"], found["dtype"]))
    print_busy(found["load_before"])
    print_table([_load_row(cell) for cell in found["load"]])
    print("\na new prompt, and the next turn of its conversation: milliseconds to the first token")
    print_table([_reading_row(cell) for cell in found["reading"]])
    print("\nmilliseconds between tokens of users, alone and while a prompt is read")
    print_table([_beside_row(cell) for cell in found["beside"]])
    if flags.plot is not None:
        from polysketch.benchmarking.serving_plot import plot_serving

        plot_serving(found, picture_title(found["environment"], found["dtype"]), flags.plot)
        print(f"plot: {flags.plot}")
    write_record(found, flags)
    return 0


def _load_row(cell: dict[str, Any]) -> Row:
    measured = "left_out" not in cell
    return {
        "attention": cell["series"],
        "users": f"{cell['users']:,}",
        "prompt": f"{cell['prompt']:,}",
        "requests/s": f"{cell['requests_per_second']:.2f}" if measured else "left out",
        "tokens/s": f"{cell['tokens_per_second']:,.0f}" if measured else "",
        "tokens/s of processor": _number(cell.get("tokens_per_cpu_second")),
        **_milliseconds("first token", cell.get("first_token")),
        **_milliseconds("between tokens", cell.get("between_tokens")),
        "server MB": megabytes(cell.get("server_bytes")),
        "states MB": megabytes(cell["state_bytes"]),
    }


def _reading_row(cell: dict[str, Any]) -> Row:
    named = {"attention": cell["series"], "prompt": f"{cell['prompt']:,}"}
    first = _milliseconds("new prompt", cell["first_token"])
    return {**named, **first, **_milliseconds("next turn", cell["first_token_of_next_turn"])}


def _beside_row(cell: dict[str, Any]) -> Row:
    return {
        "attention": cell["series"],
        "users": f"{cell['users']:,}",
        "prompt": f"{cell['prompt']:,}",
        **_milliseconds("alone", cell["alone"]["between_tokens"]),
        **_milliseconds("beside", cell["while_reading"]["between_tokens"]),
        "times as long": "" if cell["ratio"] is None else f"{cell['ratio']:.2f}",
        "of processor": "" if cell["cpu_ratio"] is None else f"{cell['cpu_ratio']:.2f}",
        "seconds to read": f"{cell['while_reading']['seconds']:.1f}",
    }


def _milliseconds(name: str, spread: dict[str, float] | None) -> Row:
    """The median, and the 99th percentile."""
    median, late = ("", "") if spread is None else (spread["median"] * 1e3, spread["percentile_99"] * 1e3)
    return {name: _number(median), "99 %" + " " * len(name): _number(late)}


def _number(value: Any) -> str:
    return "" if value in (None, "") else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
