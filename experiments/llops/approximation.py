"""How near feature maps come to (q . k)^p, and mechanisms to what they approximate (LLOPS, table 3).

    python -m experiments.llops.approximation --size smoke            seconds, to see that everything runs
    python -m experiments.llops.approximation --size cpu              minutes, on Gaussian queries and keys
    python -m experiments.llops.approximation --size cpu --run RUN    on those of a trained model

Prints the tables; the record (JSON) and the plot go where --out and --plot say.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from experiments.llops.errors import ApproximationSettings, measure_maps, measure_mechanisms
from experiments.llops.picture import plot_approximation
from experiments.llops.vectors import Vectors, gaussian_vectors, model_vectors
from experiments.study.command import run_command
from polysketch.benchmarking.environment import environment
from polysketch.benchmarking.tables import Row, print_table
from polysketch.cli.benchmark.common import show_progress, write_record
from polysketch.cli.output_files import check_folder, check_plot
from polysketch.data import PreparedData
from polysketch.training import load_model
from polysketch.training.environment import resolve_device, use_threads

SIZES = {
    "smoke": "--head-dim 6 --fit-tokens 80 --steps 3 --batch-size 20 --features 4 8 --lengths 20 50 --windows 8 32",
    "cpu": "",
}
_FITTED_SHARE = 0.75  # of the split, from its start; what is held out comes from the rest
_MEASURES = {
    "relative_mean_absolute": "relative mean absolute error, a mean of ratios (LLOPS, table 3)",
    "median_relative": "median of those ratios",
    "mean_absolute_ratio": "mean absolute error over mean weight",
    "frobenius": "relative Frobenius error",
    "ratio": "relative Frobenius error over that of the truncated SVD of the same rank",
}


@dataclass(frozen=True, kw_only=True)
class ApproximationFlags(ApproximationSettings):
    """Measure how near feature maps come to (q . k)^p and mechanisms to what they approximate, on Gaussian queries and
    keys, or with --run on those of a trained model, and print and plot it beside the best that is possible.

    Maps with parameters are first fitted to some tokens; errors are of other tokens, where it does not say fitted.
    """

    size: Literal["smoke", "cpu"] = "cpu"
    """smoke: seconds, to see that everything runs. cpu: minutes, the defaults below; other flags count more."""
    run: Path | None = None
    """folder of a training run, whose queries and keys are taken; default: layer-normed Gaussian ones"""
    data: Path | None = None
    """folder of prepared text for --run; default: the one the run was trained on"""
    split: Literal["train", "validation", "test"] = "validation"
    """which part of the text"""
    layers: tuple[int, ...] | None = None
    """layers of the model; default: the first, the middle and the last"""
    heads: tuple[int, ...] = (0,)
    """heads of each layer"""
    layer_norm: bool = False
    """layer-norm the model's queries and keys, as polynomial attention does; else they are as the model has them"""
    head_dim: int = 64
    """width of Gaussian queries and keys"""
    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU where there is one"""
    threads: int | None = None
    """cores to use on a CPU; default: PyTorch's choice"""
    json: bool = False
    """print everything as one JSON object on the last line: machine, versions, commit, settings, every error"""
    out: Path | None = None
    """write that JSON object to this file"""
    plot: Path | None = None
    """write a plot of the errors to this file (.png, .pdf or .svg)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected --{name.replace('_', '-')} of at least 1, found {value}")


def run(flags: ApproximationFlags) -> int:
    """Measure as the flags say, print the tables, write what was asked for, and return the exit status."""
    check_plot(flags.plot)
    check_folder(flags.out, "--out")
    device, started = resolve_device(flags.device), time.monotonic()
    machine = environment(device)  # before anything is measured: the source may change meanwhile
    settings = ApproximationSettings(
        **{field.name: getattr(flags, field.name) for field in dataclasses.fields(ApproximationSettings)}
    )
    with use_threads(flags.threads):
        vectors, about = _vectors(flags, device)
        measurements = measure_maps(vectors, settings, show_progress)
        measurements += measure_mechanisms(vectors, settings, show_progress)
        found = {
            "benchmark": "approximation",
            "environment": machine,
            "inputs": about,
            "settings": dataclasses.asdict(settings),
            "measurements": measurements,
            "seconds": time.monotonic() - started,
        }
    _print(found, settings)
    _write(found, flags)
    return 0


def _vectors(flags: ApproximationFlags, device: torch.device) -> tuple[list[Vectors], str]:
    """The inputs, and what they are."""
    if flags.run is None:
        found = gaussian_vectors(flags.head_dim, flags.fit_tokens, max(flags.lengths), flags.seed)
        return [_on(device, one) for one in found], f"Gaussian queries and keys of {flags.head_dim}, layer-normed"
    model, description = load_model(flags.run, device=device)
    data = PreparedData.open(description.data if flags.data is None else flags.data)
    context, last = description.context_length, model.config.num_layers - 1
    counts = [-(-tokens // context) for tokens in (flags.fit_tokens, max(flags.lengths))]
    fitted, held_out = _texts(data.split(flags.split).tokens, context, *counts)
    layers = flags.layers if flags.layers is not None else tuple(dict.fromkeys((0, (last + 1) // 2, last)))
    found = model_vectors(model, fitted, held_out, layers=layers, heads=flags.heads, norm=flags.layer_norm)
    about = (
        f"queries and keys of head {', '.join(map(str, flags.heads))} of a model trained for {description.step} steps "
        f"with {model.config.attention} attention, {model.config.num_layers} layers, {model.config.num_heads} heads of "
        f"{model.config.head_dim}, reading {context:,} tokens at a time{', layer-normed' * flags.layer_norm}"
    )
    return found, about


def _on(device: torch.device, one: Vectors) -> Vectors:
    fitted, held_out, sequence = (tuple(x.to(device) for x in part) for part in one[1:])
    return Vectors(one.name, fitted, held_out, sequence)  # type: ignore[arg-type]


def _texts(tokens: np.ndarray, context: int, fitted: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Windows spread over the first three quarters of the tokens, and over the last.

    Raises:
        ValueError: too few tokens.
    """
    cut = int(len(tokens) * _FITTED_SHARE)
    return _windows(tokens[:cut], context, fitted), _windows(tokens[cut:], context, held_out)


def _windows(tokens: np.ndarray, context: int, count: int) -> Tensor:
    if len(tokens) < context * count:
        raise ValueError(
            f"expected at least {context * count:,} tokens in that part of the split, found {len(tokens):,}: take "
            "another --split, or less with --fit-tokens and --lengths"
        )
    starts = [number * (len(tokens) // count) for number in range(count)]
    return torch.from_numpy(np.stack([tokens[start : start + context] for start in starts]).astype(np.int64))


def _print(found: dict[str, Any], settings: ApproximationSettings) -> None:
    machine, measurements = found["environment"], found["measurements"]
    print(
        f"{machine['device']}, torch {machine['torch']}, polysketch {machine['polysketch']}, "
        f"commit {machine['commit'][:12]}, {found['seconds']:,.0f} s"
    )
    print(found["inputs"])
    maps = [one for one in measurements if one["kind"] == "map"]
    if maps:
        print(f"\nmaps, fitted for {settings.steps} steps to {settings.fit_tokens:,} queries and keys")
        print_table([_map_row(one) for one in maps])
        for key, title in _MEASURES.items():
            print(f"\n{title}, {max(settings.features)} features, {max(settings.lengths):,} held-out tokens")
            print_table(_by_inputs(maps, key, settings))
    mechanisms = [one for one in measurements if one["kind"] == "mechanism"]
    if mechanisms:
        print("\nmechanisms against what they approximate: normalised weights, operator norm of the output's error")
        print_table([_mechanism_row(one) for one in mechanisms])


def _map_row(one: dict[str, Any]) -> Row:
    held_out, fitted = one["held_out"], one["fitted"]
    return {
        "inputs": one["inputs"],
        "degree": str(one["degree"]),
        "features": str(one["features"]),
        "length": f"{one['length']:,}",
        "map": one["series"],
        "Frobenius": f"{held_out['frobenius']:.3f}",
        "optimum": f"{held_out['optimum']:.3f}",
        "ratio": f"{held_out['ratio']:.2f}",
        "fitted": f"{fitted['frobenius']:.3f}",
        "its optimum": f"{fitted['optimum']:.3f}",
        "its ratio": f"{fitted['ratio']:.2f}",
        "theorem 1.1's epsilon": f"{held_out['sketch_error']:.4f}",
    }


def _by_inputs(maps: Sequence[dict[str, Any]], key: str, settings: ApproximationSettings) -> list[Row]:
    """A row for each degree and map, a column for each inputs and their mean, as in LLOPS, table 3."""
    largest = [
        one for one in maps if (one["features"], one["length"]) == (max(settings.features), max(settings.lengths))
    ]
    rows = []
    for degree, series in dict.fromkeys((one["degree"], one["series"]) for one in largest):
        own = {
            one["inputs"]: one["held_out"][key] for one in largest if (one["degree"], one["series"]) == (degree, series)
        }
        figures = {**own, "mean": fmean(own.values())}
        rows.append({"p": str(degree), "map": series, **{name: f"{figure:.3f}" for name, figure in figures.items()}})
    return rows


def _mechanism_row(one: dict[str, Any]) -> Row:
    sinks = one["alpha_without_sinks"]
    return {
        "inputs": one["inputs"],
        "length": f"{one['length']:,}",
        "mechanism": one["series"],
        "size": str(one["features"]),
        "Frobenius": f"{one['frobenius']:.3f}",
        "operator norm": f"{one['operator_norm_error']:.4f}",
        "alpha": f"{one['alpha']:.1f}",
        "alpha / n": f"{one['alpha_over_length']:.3f}",
        "without 32": "" if sinks is None else f"{sinks:.3f}",
        "mass beyond window": _shares(one["beyond"]),
        "exactly": _shares(one["exact_beyond"]),
    }


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{window}: {share:.0%}" for window, share in shares.items())


def _write(found: dict[str, Any], flags: ApproximationFlags) -> None:
    machine = found["environment"]
    if flags.plot is not None:
        title = f"{found['inputs']}\n{machine['device']}, commit {machine['commit'][:12]}"
        plot_approximation(found["measurements"], title, flags.plot)
        print(f"plot: {flags.plot}")
    write_record(found, flags)


if __name__ == "__main__":
    sys.exit(run_command("experiments.llops.approximation", run, sizes=SIZES))
