"""The CPU figures: attention, training steps and generation against softmax, memory; each beside this machine's floor.

    python -m benchmarks                            everything; under 20 minutes on 2 cores, which must be quiet
    python -m benchmarks --only forward generation  some sections
    python -m benchmarks --quick                    tiny sizes, seconds: tries the script, says nothing about speed

Every speed is a ratio of alternating calls in one run. Writes benchmarks/results/cpu-TIME.json after each section, and
a plot of the time per token beside it where matplotlib is installed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.cpu import generation, memory, models, speed
from benchmarks.cpu.settings import FULL, QUICK, Bench, Figure, Outcome, Settings, say
from benchmarks.journal import stamped
from polysketch.benchmarking import measure_rates
from polysketch.benchmarking.environment import environment
from polysketch.benchmarking.plot import plot_time_per_token
from polysketch.benchmarking.timing import Clock

SECTIONS: dict[str, Callable[[Bench], Outcome]] = {
    "forward": speed.forward,
    "backward": speed.backward,
    "training": models.training,
    "decoding": models.decoding,
    "memory": memory.attention,
    "training-memory": memory.training_step,
    "generation": generation.generation,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections asked for; returns the exit status: 1 if a section failed, not if a target was missed."""
    arguments = _parse(argv)
    settings = QUICK if arguments.quick else FULL
    path = arguments.out or RESULTS / stamped("cpu-quick" if arguments.quick else "cpu", ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    bench = _bench(settings)
    report = _report(bench, arguments.quick)
    _print_machine(report)
    for name in arguments.only or SECTIONS:
        report["sections"][name] = _run_section(name, bench)
        _write(report, path)
    drawn = _plot(report, path.with_suffix(".png"))
    print(f"\nwrote {path}" + (f" and {path.with_suffix('.png')}" if drawn else ""))
    return 1 if any("error" in section for section in report["sections"].values()) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the script in seconds")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/cpu-TIME.json")
    return parser.parse_args(argv)


def _bench(settings: Settings) -> Bench:
    clock = Clock(torch.device("cpu"))
    rates = measure_rates(clock, torch.float32, settings.rate_size)
    return Bench(clock=clock, rates=rates, repeats=settings.repeats, progress=say, settings=settings)


def _report(bench: Bench, quick: bool) -> dict[str, Any]:
    return {
        "environment": environment(torch.device("cpu")),
        "quick": quick,
        "settings": asdict(bench.settings),
        "rates": asdict(bench.rates),
        "sections": {},
    }


def _run_section(name: str, bench: Bench) -> dict[str, Any]:
    """One section's figures and measurements, printed and as JSON; a failure is recorded and the rest goes on."""
    print(f"\n{name}", flush=True)
    started, load = time.monotonic(), _load()
    try:
        outcome = SECTIONS[name](bench)
    except Exception as error:  # noqa: BLE001 - hours of other sections must not be lost with it
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        return {"error": f"{type(error).__name__}: {error}"}
    for figure in outcome.figures:
        print(_line(figure), flush=True)
    figures = [{**asdict(figure), "reached": figure.reached} for figure in outcome.figures]
    took = {"seconds": time.monotonic() - started, "load_before": load, "load_after": _load()}
    return {"figures": figures, "measurements": outcome.measurements, **took}


def _line(figure: Figure) -> str:
    verdict = {True: "reached", False: "MISSED", None: ""}[figure.reached]
    bounds = [f">= {figure.at_least:g}"] if figure.at_least is not None else []
    bounds += [f"<= {figure.at_most:g}"] if figure.at_most is not None else []
    target = f"{' and '.join(bounds)} {verdict}".strip()
    return f"  {figure.name:<66} {figure.value:9.3f} {figure.unit:<3} {target:<26} {figure.note}"


def _print_machine(report: dict[str, Any]) -> None:
    machine, rates = report["environment"], report["rates"]
    print(
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, commit {machine['commit'][:12]}"
    )
    print(
        f"float32 product {rates['operations'] / 1e9:.0f} GFLOP/s, copy {rates['bandwidth'] / 1e9:.1f} GB/s,"
        f" load {_load():.1f}: floors below are operations over the first, or bytes over the second if that is longer"
    )


def _load() -> float:
    """Processes that want to run, averaged over a minute: above the cores the times are not to be trusted."""
    return os.getloadavg()[0]


def _write(report: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def _plot(report: dict[str, Any], path: Path) -> bool:
    """One picture of everything that was timed; false without matplotlib, or where nothing was."""
    sections = report["sections"].values()
    timed = [one for section in sections for one in section.get("measurements", []) if "direction" in one]
    machine = report["environment"]
    title = f"{machine['device']}, {machine['threads']} threads, float32, commit {machine['commit'][:12]}"
    try:
        plot_time_per_token(timed, title, path)
    except (ImportError, ValueError) as error:
        print(f"\nno plot: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
