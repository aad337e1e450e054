"""Perplexity and time against the number of replaced layers (HyperAttention, figure 3).

    python -m experiments.hyperattention.patching MODEL --data DATA --size smoke    seconds, to see that everything runs
    python -m experiments.hyperattention.patching MODEL --data DATA --size cpu      windows of 8,192 tokens
    python -m experiments.hyperattention.patching MODEL --data DATA --size paper    of 32,768, as in the figure

MODEL is a folder of a causal language model that transformers saved, DATA text prepared with its tokenizer, or a text
file. Prints the table; record (JSON), CSV and plot go where --out, --csv and --plot say.
"""

import csv
import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from experiments.hyperattention.picture import plot_patching
from experiments.hyperattention.replacing import PatchingSettings, measure_patching
from experiments.study.command import run_command
from polysketch.attention import mechanism_class
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import Row, print_table
from polysketch.benchmarking.workbench import save
from polysketch.cli.attention_options import parse_attention_options
from polysketch.cli.benchmark.common import machine_line, print_busy, show_progress, write_record
from polysketch.cli.output_files import check_folder, check_plot
from polysketch.data import PreparedData
from polysketch.integrations.replacement import attention_layers
from polysketch.integrations.transformers_folder import read_model, tokens_of
from polysketch.training.environment import resolve_device, resolve_dtype, use_threads

SIZES = {
    "smoke": "--context 128 --windows 1 --attention-options min_length=16 chunk_size=4 sample_size=4 --layers all",
    "cpu": "",
    "paper": "--context 32768",
}


@dataclass(frozen=True, kw_only=True)
class PatchingFlags:
    """Replace the last layers of a softmax model of transformers, one more at a time, without training it again, and
    measure perplexity and the time of attention (HyperAttention, figure 3).

    Whole windows are read at once, without a cache. HyperAttention is exact up to its min_length, so that --context
    must be longer, or --attention-options min_length=... shorter.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """folder of a causal language model that transformers saved"""
    data: Path
    """folder of text prepared with the model's tokenizer, or a text file, for the tokenizer in the model's folder"""
    split: Literal["train", "validation", "test"] = "validation"
    """which part of prepared text"""
    size: Literal["smoke", "cpu", "paper"] = "cpu"
    """smoke: seconds, to see that everything runs. cpu: the defaults below. paper: windows of 32,768 tokens; other
    flags count more."""
    attention: str = "hyper"
    """the mechanism to put in the place of softmax"""
    attention_options: tuple[str, ...] = ()
    """its options, as key=value"""
    layers: str = "all"
    """how many of the last layers: "0..8", "0..32:4" (every fourth) or "0,7,14"; all is from 0 to all of them"""
    context: int = 8192
    """tokens of a window"""
    windows: int = 4
    """how many windows, spread over the text; times are medians over them"""
    ignore_sliding_window: bool = False
    """replace also layers that attend to a window alone by attention without a window"""
    seed: int = 0
    """of mechanisms with random weights"""
    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the model's weights; auto is bfloat16 on a GPU and float32 on a CPU"""
    threads: int | None = None
    """cores to use on a CPU; default: PyTorch's choice"""
    json: bool = False
    """print everything as one JSON object on the last line: machine, versions, commit, settings, every time"""
    out: Path | None = None
    """write that JSON object to this file after every row; rows that it holds already, of the same settings on the same
    device, are not measured again"""
    csv: Path | None = None
    """write the table to this file"""
    plot: Path | None = None
    """write a plot of perplexity and time to this file (.png, .pdf or .svg)"""

    def __post_init__(self) -> None:
        for name in ("context", "windows", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected --{name} of at least 1, found {value}")


def run(flags: PatchingFlags) -> int:
    """Measure as the flags say, print the table, write what was asked for, and return the exit status."""
    check_plot(flags.plot)
    check_folder(flags.out, "--out")
    check_folder(flags.csv, "--csv")
    device = resolve_device(flags.device)
    options = parse_attention_options(flags.attention_options, mechanism_class(flags.attention), flags.attention)
    _note_exact(flags, options)
    tokens = _tokens(flags)
    with use_threads(flags.threads):
        model = read_model(flags.model, dtype=resolve_dtype(flags.dtype, device), device=device)
        settings = PatchingSettings(
            attention=flags.attention,
            attention_options=options,
            layers=_layers(flags.layers, len(attention_layers(model))),
            context=flags.context,
            windows=flags.windows,
            ignore_sliding_window=flags.ignore_sliding_window,
            seed=flags.seed,
        )
        found = _record(flags, settings, device)
        done = _done(flags.out, found)

        def keep(row: dict[str, Any]) -> None:
            found["measurements"].append(row)
            if flags.out is not None:
                save(found, flags.out)

        found["measurements"] = list(done)
        rows = measure_patching(model, tokens, settings, done=done, on_row=keep, progress=show_progress)
    found["measurements"] = rows
    _print(found)
    _write(found, flags)
    return 0


def _note_exact(flags: PatchingFlags, options: Mapping[str, Any]) -> None:
    """HyperAttention is exact in short sequences: then there is nothing to see."""
    default = inspect.signature(mechanism_class("hyper")).parameters["min_length"].default
    if flags.attention == "hyper" and flags.context <= options.get("min_length", default):
        print(
            f"note: hyper is exact up to {options.get('min_length', default)} tokens, so that nothing changes at a "
            f"context of {flags.context}: choose a longer --context, or --attention-options min_length=...",
            file=sys.stderr,
        )


def _tokens(flags: PatchingFlags) -> np.ndarray:
    if flags.data.is_dir():
        return PreparedData.open(flags.data).split(flags.split).tokens
    return tokens_of(flags.data.read_text(encoding="utf-8"), flags.model)


def _layers(text: str, count: int) -> tuple[int, ...]:
    """The numbers that `--layers` means.

    Raises:
        ValueError: a text of another form.
    """
    if text == "all":
        return tuple(range(count + 1))
    try:
        if ".." not in text:
            return tuple(int(part) for part in text.split(","))
        first, _, rest = text.partition("..")
        last, _, step = rest.partition(":")
        return tuple(range(int(first), int(last) + 1, int(step or 1)))
    except ValueError as error:
        raise ValueError(f'--layers: expected "all", "0..8", "0..32:4" or "0,7,14", found {text!r}') from error


def _record(flags: PatchingFlags, settings: PatchingSettings, device: torch.device) -> dict[str, Any]:
    asked = {**dataclasses.asdict(settings), "model": str(flags.model), "data": str(flags.data), "split": flags.split}
    asked["dtype"] = str(resolve_dtype(flags.dtype, device))
    return {
        "benchmark": "patching",
        "environment": environment(device),
        "load_before": load(),
        "settings": json.loads(json.dumps(asked)),
        "measurements": [],
    }


def _done(out: Path | None, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier call in the file `out`, where its settings are these, whatever its numbers of layers."""
    if out is None or not out.exists():
        return []
    try:
        earlier = json.loads(out.read_text(encoding="utf-8"))
        same = _comparable(earlier) == _comparable(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--out {out} exists and is no record of this benchmark: name another file") from error
    if not same:
        raise ValueError(f"--out {out} holds a record of other settings, or of another machine: name another file")
    return earlier["measurements"]


def _comparable(record: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = {name: value for name, value in record["settings"].items() if name != "layers"}
    machine = record["environment"]
    return record["benchmark"], settings, machine["device"], machine["threads"], machine["torch"], machine["polysketch"]


def _print(found: Mapping[str, Any]) -> None:
    machine, settings = found["environment"], found["settings"]
    print(machine_line(machine, settings["dtype"]))
    print(
        f"{settings['model']}, the last layers replaced by {settings['attention']}, {settings['windows']} windows of "
        f"{settings['context']:,} tokens; attention without projections, medians over the windows"
    )
    print_busy(found["load_before"])
    print_table(_table(found["measurements"]))


def _table(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Speed-ups are against the row of the fewest layers, if that is none."""
    none = rows[0] if rows[0]["layers"] == 0 else None
    return [
        {
            "layers": str(row["layers"]),
            "perplexity": f"{row['perplexity']:.4g}",
            "loss": f"{row['loss']:.4f}",
            "attention s": f"{row['attention_seconds']:.4g}",
            "times as fast": "" if none is None else f"{none['attention_seconds'] / row['attention_seconds']:.2f}",
            "forward s": f"{row['forward_seconds']:.4g}",
            "of forward": f"{row['attention_seconds'] / row['forward_seconds']:.0%}",
        }
        for row in rows
    ]


def _write(found: Mapping[str, Any], flags: PatchingFlags) -> None:
    machine, rows = found["environment"], found["measurements"]
    if flags.csv is not None:
        _write_csv(flags.csv, rows)
        print(f"table: {flags.csv}")
    if flags.plot is not None:
        title = f"{flags.model.name}, windows of {flags.context:,} tokens\n{machine['device']}, "
        plot_patching(rows, flags.attention, f"{title}commit {machine['commit'][:12]}", flags.plot)
        print(f"plot: {flags.plot}")
    write_record(found, flags)


def _write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ["layers", "perplexity", "loss", "attention_seconds", "forward_seconds"]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(run_command("experiments.hyperattention.patching", run, sizes=SIZES))
