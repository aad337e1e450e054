"""What all benchmarks share: their flags, and the way from settings to a table, a record and a plot."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from polysketch import benchmarking
from polysketch.benchmarking.settings import Settings, check_positive
from polysketch.benchmarking.tables import Row, print_table, print_text
from polysketch.cli.output_files import check_folder, check_plot

if TYPE_CHECKING:
    from polysketch.benchmarking import Workbench


AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """Where to run, how often, and where to write."""

    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of attention's inputs and of the matrix products of models; auto is bfloat16 on a GPU and float32 on a CPU"""
    threads: int | None = None
    """cores to use on a CPU; default: PyTorch's choice"""
    repeats: int = 3
    """timed rounds, the ways taking turns, after one round to warm up; the median counts"""
    json: bool = False
    """print everything as one JSON object on the last line: machine, versions, commit, settings, every single time"""
    out: Path | None = None
    """write that JSON object to this file"""
    plot: Path | None = None
    """write a plot of the time per token, and of memory where it is measured, to this file (.png, .pdf or .svg)"""

    def __post_init__(self) -> None:
        check_positive(**{"--threads": 1 if self.threads is None else self.threads, "--repeats": self.repeats})
        settings: Any = super()  # flags are these and the fields of a benchmark's settings
        settings.__post_init__()


def run_benchmark(
    name: str,
    flags: CommonFlags,
    settings: type[AnySettings],
    row: Callable[[dict[str, Any]], Row],
    measure: Callable[["Workbench", AnySettings], list[dict[str, Any]]] | None = None,
    note: str = "",
) -> int:
    """Measure as the flags say, print the table, write what was asked for.

    Args:
        name: of the benchmark.
        flags: the common ones and, by name, the fields of `settings`.
        settings: the dataclass of settings.
        row: a measurement as a row of the table, by column.
        measure: what times; default: `polysketch.benchmarking.time_NAME`, loaded after the flags are looked at.
        note: a line above the table, below the settings.

    Returns:
        Exit status 0.

    Raises:
        ValueError: flags that do not fit, or a result that disagrees with its definition.
        FileNotFoundError, ImportError: a file that could not be written, before anything is timed.
    """
    check_plot(flags.plot)
    check_folder(flags.out, "--out")
    asked = settings(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(settings)})
    asked.check_names()  # before PyTorch is loaded
    from polysketch.training.environment import use_threads

    with use_threads(flags.threads):
        bench, time = _workbench(flags), measure or getattr(benchmarking, f"time_{name}")
        found = benchmarking.record(name, bench, asked, time(bench, asked))
    print_machine(found["environment"], found["dtype"], found["rates"], found["load_before"])
    directions = dict.fromkeys(one["direction"] for one in found["measurements"])
    print_text(f"{'; '.join(directions)}: {_described(found['settings'])}")
    if note:
        print_text(note)
    print_table([row(one) for one in found["measurements"]])
    if flags.plot is not None:
        from polysketch.benchmarking.plot import plot_time_per_token

        plot_time_per_token(found["measurements"], picture_title(found["environment"], found["dtype"]), flags.plot)
        print(f"plot: {flags.plot}")
    write_record(found, flags)
    return 0


def _described(settings: dict[str, Any]) -> str:
    """The sizes that are numbers or words: rows of them, and switches, are columns of the table."""
    sizes = {name: size for name, size in settings.items() if type(size) in (int, str)}
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


def _workbench(flags: CommonFlags) -> "Workbench":
    from polysketch.benchmarking import Workbench, measure_rates
    from polysketch.benchmarking.timing import Clock
    from polysketch.training.environment import resolve_device, resolve_dtype

    device = resolve_device(flags.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected --device cpu or cuda, found {flags.device!r}: nothing else has a clock here")
    dtype, clock = resolve_dtype(flags.dtype, device), Clock(device)
    rates = measure_rates(clock, dtype)
    return Workbench(clock=clock, rates=rates, dtype=dtype, repeats=flags.repeats, progress=show_progress)


def show_progress(text: str) -> None:
    """A line on a terminal's stderr; nothing where that goes into a file."""
    if sys.stderr.isatty():
        print(f"  {text}", file=sys.stderr, flush=True)


class Steps:
    """Numbered lines on stderr, into a file too: for what takes minutes.

    Args:
        total: lines that are to come, at most.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def __call__(self, text: str) -> None:
        """Tell what begins, and how much of the whole is done."""
        seconds = time.monotonic() - self._started
        left = f", about {seconds / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        self._done += 1
        print(f"  [{self._done} of {self._total}, {seconds:.0f} s{left}] {text}", file=sys.stderr, flush=True)


def machine_line(machine: dict[str, Any], dtype: str) -> str:
    """What ran, and on what."""
    return (
        f"{machine['device']}, {machine['threads']} threads, {dtype}, torch {machine['torch']}, "
        f"polysketch {machine['polysketch']}, commit {machine['commit'][:12]}"
    )


def print_machine(machine: dict[str, Any], dtype: str, rates: dict[str, float], load: float | None) -> None:
    """What ran, and on what; what the machine does at best, and what that says about times; whether it was quiet."""
    print_text(machine_line(machine, dtype))
    print_text(
        f"product of matrices {rates['operations'] / 1e9:,.0f} GFLOP/s, copy {rates['bandwidth'] / 1e9:,.1f} GB/s: the "
        "floor is operations over the first, or bytes over the second if that is longer"
    )
    print_busy(load)


def picture_title(machine: dict[str, Any], dtype: str) -> str:
    """What ran, and on what, in the width of a picture."""
    return f"{machine['device']}, {machine['threads']} threads, {dtype}, commit {machine['commit'][:12]}"


def print_busy(load: float | None) -> None:
    """Say that times are not to be trusted where other programs want half of the cores or more."""
    cores = os.cpu_count() or 1
    if load is not None and load > cores / 2:
        print_text(f"load {load:.1f} on {cores} cores before the start: other programs ran, do not trust these times")


def time_columns(one: dict[str, Any], baseline: str) -> Row:
    """The columns that every benchmark has: time, ratio, floor, tokens per second; empty where there is no figure."""
    floor, seconds = one["floor_seconds"], one["seconds"]
    return {
        "ms": "over budget" if seconds is None else f"{seconds * 1e3:,.3f}",
        f"speedup over {baseline}": "" if one["ratio"] is None else f"{one['ratio']:.2f}",
        "floor ms": "" if floor is None else f"{floor * 1e3:,.3f}",
        "of floor": "" if floor is None or seconds is None else f"{floor / seconds:.0%}",
        "tokens/s": "" if seconds is None else f"{one['tokens_per_second']:,.0f}",
    }


def write_record(found: dict[str, Any], flags: Any) -> None:
    """Into the file of `--out`, and as the last line with `--json`."""
    if flags.out is not None:
        from polysketch.benchmarking.workbench import save

        save(found, flags.out)
        print(f"record: {flags.out}")
    if flags.json:
        print(json.dumps(found))
