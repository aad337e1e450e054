"""Everything on a GPU in one call of under 8 minutes: is it right, and how fast beside the fused kernels and the floor.

    python benchmarks/gpu_check.py                              results in benchmarks/results/gpu-*.jsonl
    python benchmarks/gpu_check.py --out FOLDER/gpu.jsonl --budget-seconds 450
    python benchmarks/gpu_check.py --only checks                or several of checks, attention, training, decoding
    python benchmarks/gpu_check.py --device cpu --quick         the whole script with tiny sizes, without a GPU

1. Correctness: every op, map, mechanism and the model, forward and backward, against float64 on the CPU; fresh memory
   is filled with NaN first. 2. What the device does at best: a bfloat16 product, a copy. 3. The floor of every case,
   stated before anything is timed, then the times. 4. Training steps of gpt2-small, and decoding.

Every case is written as a JSON line as soon as it is known; one that fails or does not fit is recorded with its reason
and the rest goes on. Exit status 1 if a correctness check failed or none could run, else 0: a fused kernel that is
missing is no error. Needs torch and numpy alone; a clone that is not installed will do.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path

import torch

if not __package__:  # called as a file: the clone's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import RESULTS
from benchmarks.budget import Budget, Section
from benchmarks.checks import all_checks, run_check
from benchmarks.gpu import attention, language_model
from benchmarks.gpu.cases import text_of
from benchmarks.gpu.table import print_table
from benchmarks.journal import Journal, stamped
from polysketch.benchmarking.environment import environment
from polysketch.benchmarking.timing import Clock, Rates, copy_bandwidth, matmul_precision, matrix_rate

_SHARES = {"checks": 0.45, "attention": 0.6, "training": 0.55, "decoding": 0.95}
"""Of what is left when each section begins; what one does not use is the next one's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sections; returns the exit status."""
    arguments = _parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: --device cuda, but PyTorch sees no GPU here; --device cpu --quick tries the script itself")
        return 2
    with matmul_precision("highest"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fused kernels that are missing are reported as failed cases
        return _run(device, arguments)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(_SHARES), metavar="SECTION", help=", ".join(_SHARES))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: under a minute on a CPU")
    parser.add_argument("--out", type=Path, help="file of JSON lines; default benchmarks/results/gpu-TIME.jsonl")
    parser.add_argument("--budget-seconds", type=float, default=450.0, help="what does not fit is left out, by name")
    return parser.parse_args(argv)


def _run(device: torch.device, arguments: argparse.Namespace) -> int:
    budget = Budget(arguments.budget_seconds)
    journal = Journal(arguments.out or RESULTS / stamped("gpu-quick" if arguments.quick else "gpu", ".jsonl"))
    described = journal.write("environment", **environment(device), quick=arguments.quick)
    print(f"{described['device']}, torch {described['torch']}, commit {described['commit'][:12]}", flush=True)
    asked = arguments.only or _SHARES
    for name in ("checks", "timing"):
        _guarded(name, journal, partial(_PARTS[name], device, asked, budget, journal, quick=arguments.quick))
    print_table(journal)
    print(f"{time.monotonic() - budget.started:.0f} s; all numbers in {journal.path}")
    checks = journal.of("check")
    unchecked = "checks" in asked and not checks
    return 0 if all(check["passed"] for check in checks) and not unchecked and not journal.of("crashed") else 1


def _guarded(name: str, journal: Journal, part: Callable[[], None]) -> None:
    """Run a part of the script; what is known when it breaks down is still shown at the end."""
    try:
        part()
    except Exception as error:  # noqa: BLE001 - a run on a lent machine must not lose what it measured
        record = journal.write("crashed", part=name, error=text_of(error))
        print(f"  CRASHED: {record}", flush=True)


def _check(device: torch.device, asked: Container[str], budget: Budget, journal: Journal, *, quick: bool) -> None:
    """Run the checks that fit; a failing one is named at once."""
    if "checks" not in asked:
        return
    section, started = budget.section(_SHARES["checks"]), time.monotonic()
    for check in all_checks(quick=quick):
        if not section.fits(2.0):
            journal.write("skipped", section="checks", name=check.name, reason="no time left in this section")
            continue
        record = journal.write("check", **run_check(check, device))
        if not record["passed"]:
            print(f"  WRONG: {record}", flush=True)
    print(f"  {len(journal.of('check'))} checks in {time.monotonic() - started:.0f} s", flush=True)


def _time(device: torch.device, asked: Container[str], budget: Budget, journal: Journal, *, quick: bool) -> None:
    """Ceilings, floors, and the timed sections asked for."""
    if not any(name in asked for name in _TIMED):
        return
    clock = Clock(device, most=2 if quick else 20)
    rates = _measure_rates(clock, journal, quick=quick)
    for name, section in _TIMED.items():
        if name in asked:
            section(clock, rates, budget.section(_SHARES[name]), journal, quick=quick)


def _time_attention(clock: Clock, rates: Rates, section: Section, journal: Journal, *, quick: bool) -> None:
    points = attention.cases(quick=quick)
    attention.state_floors(points, rates, journal)
    attention.time_cases(points, clock, rates, section, journal)


_TIMED = {
    "attention": _time_attention,
    "training": language_model.time_training,
    "decoding": language_model.time_decoding,
}
_PARTS = {"checks": _check, "timing": _time}


def _measure_rates(clock: Clock, journal: Journal, *, quick: bool) -> Rates:
    """Ceilings of this device, measured in this run."""
    size = 256 if quick else 8192
    operations = matrix_rate(clock, torch.bfloat16, size)
    single = matrix_rate(clock, torch.float32, size)
    with matmul_precision("high"):
        tf32 = matrix_rate(clock, torch.float32, size)
    bandwidth = copy_bandwidth(clock, 2**22 if quick else 2**30)
    journal.write("rates", bfloat16=operations, float32=single, tf32=tf32, copy_bytes_per_second=bandwidth)
    print(
        f"  products: bfloat16 {operations / 1e12:.1f}, TF32 {tf32 / 1e12:.1f}, float32 {single / 1e12:.1f} TFLOP/s;"
        f" copy {bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    return Rates(operations, bandwidth)


if __name__ == "__main__":
    sys.exit(main())
