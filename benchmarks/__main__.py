"""The CPU figures: attention, training steps and decoding against softmax, memory; each beside this machine's floor.

    python -m benchmarks                            everything; under 25 minutes on 2 cores, which must be quiet
    python -m benchmarks --only forward decoding    some sections
    python -m benchmarks --quick                    tiny sizes, seconds: tries the script, says nothing about speed

Every speed is a ratio of alternating calls in one run. Writes benchmarks/results/cpu-TIME.json after each section, and
a plot of the time per token beside it where matplotlib is installed.
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
from benchmarks.cpu import FULL, QUICK, Scale, run_section
from benchmarks.figures import draw
from benchmarks.journal import stamped
from polysketch.benchmarking import Workbench, measure_rates
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.workbench import save
from polysketch.cli.benchmark.common import picture_title, print_machine

_DTYPE = "float32"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections asked for; returns the exit status: 1 if a section failed, not if a target was missed."""
    arguments = _parse(argv)
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
        save(report, path)
    print(f"\nrecord: {path}")
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
        figures, measurements = run_section(name, bench, scale)
    except Exception as error:  # noqa: BLE001 - hours of other sections must not be lost with it
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        return {"error": f"{type(error).__name__}: {error}"}
    if scale != FULL:  # a run that tries the script says nothing about targets
        figures = [replace(one, at_least=None, at_most=None) for one in figures]
    for one in figures:
        print(f"  {one.line}", flush=True)
    took = {"seconds": time.monotonic() - started, "load_before": before, "load_after": load()}
    return {"figures": [one.as_json() for one in figures], "measurements": measurements, **took}


if __name__ == "__main__":
    sys.exit(main())
