"""The CPU figures: attention, training steps and decoding against softmax, memory; each beside this machine's floor.

    python -m benchmarks                            everything; half an hour on 2 cores, which must be quiet
    python -m benchmarks --only forward decoding    some sections
    python -m benchmarks --quick                    tiny sizes: tries the script, says nothing about speed; most of its
                                                    minutes are the compiler's, of the section first-call

Every speed is a ratio of alternating calls in one run. A figure with a target is marked as reached or MISSED, and under
a missed one stands why, as far as anybody knows. What cannot be measured here is a line, "skipped", with the reason. At
the end stand the seconds of every section. Writes benchmarks/results/cpu-TIME.json after each section, and a plot of
the time per token beside it where matplotlib is installed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.cpu import run_section
from benchmarks.figures import Found, draw
from benchmarks.journal import stamped
from benchmarks.scale import FULL, QUICK, Scale
from polysketch.benchmarking import Workbench, measure_rates
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.workbench import save
from polysketch.cli.benchmark.common import picture_title, print_machine

_DTYPE = "float32"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections asked for; returns the exit status: 1 if a section failed, not if a target was missed."""
    arguments, started = _parse(argv), time.monotonic()
    path = arguments.out or RESULTS / stamped("cpu-quick" if arguments.quick else "cpu", ".json")
    scale, clock = QUICK if arguments.quick else FULL, Clock(torch.device("cpu"))
    rates = measure_rates(clock, torch.float32, scale.rate_size)
    bench = Workbench(clock=clock, rates=rates, repeats=scale.repeats, progress=_say)
    report: dict[str, Any] = {
        "environment": environment(bench.device),
        "quick": arguments.quick,
        "settings": asdict(scale),
        "rates": asdict(rates),
        "sections": {},
    }
    print_machine(report["environment"], _DTYPE, report["rates"], load())
    for name in arguments.only or scale.sections:
        report["sections"][name] = _run_section(name, bench, scale)
        report["seconds"] = time.monotonic() - started
        save(report, path)
    _print_end(report)
    print(f"record: {path}")
    sections = report["sections"].values()
    timed = [one for section in sections for one in section.get("measurements", [])]
    draw(timed, picture_title(report["environment"], _DTYPE), path.with_suffix(".png"))
    return 1 if any("error" in section for section in sections) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=tuple(FULL.sections), metavar="NAME", help=", ".join(FULL.sections)
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the script in seconds")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/cpu-TIME.json")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _run_section(name: str, bench: Workbench, scale: Scale) -> dict[str, Any]:
    """One section's figures and measurements, printed and as JSON; a failure is recorded and the rest goes on."""
    print(f"\n{name}", flush=True)
    started, before = time.monotonic(), load()
    try:
        found = _as_json(run_section(name, bench, scale), with_targets=scale == FULL)
    except Exception as error:  # noqa: BLE001 - hours of other sections must not be lost with it
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": time.monotonic() - started, "load_before": before, "load_after": load()}


def _as_json(found: Found, *, with_targets: bool) -> dict[str, Any]:
    """Print a section; a run that tries the script says nothing about targets."""
    figures = found.figures if with_targets else [replace(one, target=None) for one in found.figures]
    for line in [*(line for one in figures for line in one.lines), *(f"skipped: {line}" for line in found.skipped)]:
        print(f"  {line}", flush=True)
    rest = {"measurements": found.measurements, "rows": found.rows, "skipped": found.skipped}
    return {"figures": [one.as_json() for one in figures], **rest}


def _print_end(report: dict[str, Any]) -> None:
    """How many targets are reached, which are missed, and where the time went."""
    with_target = [one for section in report["sections"].values() for one in section.get("figures", [])]
    with_target = [one for one in with_target if one["reached"] is not None]
    missed = [one["name"] for one in with_target if not one["reached"]]
    if with_target:
        print(f"\ntargets: {len(with_target) - len(missed)} reached, {len(missed)} MISSED", *missed, sep="\n  ")
    spent = ", ".join(f"{name} {section['seconds']:.0f}" for name, section in report["sections"].items())
    print(f"\nseconds: {spent}; in all {report['seconds'] / 60:.1f} minutes")


if __name__ == "__main__":
    sys.exit(main())
