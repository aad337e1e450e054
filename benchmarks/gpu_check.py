"""Everything on a GPU in two calls of under 8 minutes each: is it right, and how fast beside the fused kernels.

    python benchmarks/gpu_check.py check                        results in benchmarks/results/gpu-check-TIME.jsonl
    python benchmarks/gpu_check.py check --match linear         the tests of which pytest's -k says so
    python benchmarks/gpu_check.py bench                        results in benchmarks/results/gpu-bench-TIME.jsonl, .png
    python benchmarks/gpu_check.py bench --only attention       or several of attention, training, decoding
    python benchmarks/gpu_check.py bench --match sdpa hyper     series and models with such a part in their names
    python benchmarks/gpu_check.py check --device cpu --quick   the script with tiny sizes, without a GPU; bench too
    python benchmarks/gpu_check.py bench --out FOLDER/gpu.jsonl --budget-seconds 300

check: the tests in tests/device on this device, by pytest, in several processes where pytest-xdist is installed. Every
op by every backend that runs there, in every dtype, forward and backward, against the formula in float64: an output may
be off by twice, a gradient by three times as much as the plain formula in the same dtype, and the same call twice gives
the same bits. Then masks, states, decoding, every map, mechanism and the model within tolerances; fresh memory is
filled with NaN first. compute-sanitizer over every program where it is installed.
bench: what the device does at best, a bfloat16 product and a copy; attention alone from 1k to 128k tokens, training
steps of gpt2-small, decoding, each beside its floor; targets, reached or MISSED. Each section runs in a process of its
own: where that crashes or hangs, its case has failed and the next case goes on.

Every case is written as a JSON line as soon as it is known; one that fails or does not fit is recorded with its reason
and the rest goes on. Exit status 1 if something is wrong, broke down, or could not be checked at all, else 0: a missed
target or a missing fused kernel is no error. Needs torch and numpy, `check` pytest too, and the picture matplotlib; a
clone that is not installed will do.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not __package__:  # called as a file: the clone's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import RESULTS, checking, sanitizer
from benchmarks.budget import Budget
from benchmarks.figures import draw
from benchmarks.gpu import generated_tokens, kernels, language_model
from benchmarks.gpu.apart import run_apart
from benchmarks.gpu.cases import Bench, text_of
from benchmarks.gpu.report import measurements, print_bench, print_check
from benchmarks.journal import Journal, stamped
from polysketch.benchmarking.environment import environment
from polysketch.benchmarking.timing import Clock, copy_bandwidth, matmul_precision, matrix_rate

_LAST = 0.92  # of what is left, for the last section of `bench`
_CHECKING = 0.9  # of the budget; the rest is for the processes' last tasks and the sanitizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run `check` or `bench`; returns the exit status."""
    arguments = _parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: --device cuda, but PyTorch sees no GPU here; --device cpu --quick tries the script itself")
        return 2
    if arguments.verb == "check" and (reason := checking.why_not()) is not None:
        print(reason)
        return 2
    with matmul_precision("highest"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fused kernels that are missing are reported as failed cases
        if getattr(arguments, "section", None):
            section, journal = Budget(arguments.budget_seconds), Journal(arguments.out, keep=True)
            _SECTIONS[arguments.section][1](_prepared(device, section, journal, arguments))
            return 0
        return _run(device, arguments)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    check = verbs.add_parser("check", help="is everything right?")
    check.add_argument("--processes", type=int, help="at once; default: on a GPU one for each core but two, at most 12")
    check.add_argument("--match", metavar="EXPRESSION", help="tests that pytest's -k picks, as 'linear and bfloat16'")
    bench = verbs.add_parser("bench", help="how fast is it?")
    sections = [name for name in _SECTIONS if name != "rates"]
    bench.add_argument("--only", nargs="+", choices=sections, metavar="SECTION", help=", ".join(sections))
    bench.add_argument("--match", nargs="+", default=[], metavar="PART", help="series and models of such names alone")
    bench.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        help="each section in a process of its own, which may crash; default: on CUDA",
    )
    bench.add_argument("--section", choices=[*_SECTIONS], help=argparse.SUPPRESS)  # one of those processes
    for verb in (check, bench):
        verb.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        verb.add_argument("--quick", action="store_true", help="tiny sizes: a minute or two on a CPU")
        verb.add_argument("--out", type=Path, help="file of JSON lines; default in benchmarks/results, with the time")
        verb.add_argument("--budget-seconds", type=float, default=450.0, help="what does not fit is left out, by name")
    return parser.parse_args(argv)


def _run(device: torch.device, arguments: argparse.Namespace) -> int:
    budget = Budget(arguments.budget_seconds)
    name = f"gpu-{arguments.verb}{'-quick' if arguments.quick else ''}"
    journal = Journal(arguments.out or RESULTS / stamped(name, ".jsonl"))
    described = journal.write("environment", **environment(device), quick=arguments.quick)
    title = f"{described['device']}, torch {described['torch']}, triton {described['triton']}"
    title += f", commit {described['commit'][:12]}"
    print(title, flush=True)
    run = {"check": _check, "bench": _bench}[arguments.verb]
    _guarded(arguments.verb, journal, lambda: run(device, arguments, budget, journal))
    if arguments.verb == "check":
        _guarded("table", journal, lambda: print_check(journal))
    else:
        _guarded("table", journal, lambda: print_bench(journal))
        _guarded("picture", journal, lambda: draw(measurements(journal), title, journal.path.with_suffix(".png")))
    print(f"{time.monotonic() - budget.started:.0f} s; all numbers in {journal.path}")
    return _status(arguments.verb, journal)


def _status(verb: str, journal: Journal) -> int:
    found = [*journal.of("check"), *journal.of("sanitizer")]
    wrong = any(one["passed"] is False for one in found)
    unchecked = verb == "check" and not journal.of("check")
    return 1 if wrong or unchecked or journal.of("crashed") else 0


def _guarded(name: str, journal: Journal, part: Callable[[], None]) -> None:
    """Run a part of the script; what is known when it breaks down is still shown at the end."""
    try:
        part()
    except Exception as error:  # noqa: BLE001 - a run on a lent machine must not lose what it measured
        record = journal.write("crashed", part=name, error=text_of(error))
        print(f"  CRASHED: {record}", flush=True)


def _check(device: torch.device, arguments: argparse.Namespace, budget: Budget, journal: Journal) -> None:
    """Run the tests that fit."""
    looking_on = sanitizer.start() if device.type == "cuda" else "there is no GPU"
    how: dict[str, Any] = {name: getattr(arguments, name) for name in ("processes", "quick", "match")}
    checking.run_tests(device.type, budget.section(_CHECKING), journal, **how)
    journal.write("sanitizer", **sanitizer.finish(looking_on, budget.left))


def _bench(device: torch.device, arguments: argparse.Namespace, budget: Budget, journal: Journal) -> None:
    """Ceilings, floors, and the timed sections asked for; each goes on whatever becomes of the others."""
    apart = device.type == "cuda" if arguments.apart is None else arguments.apart
    wanted = [name for name in _SECTIONS if name == "rates" or name in (arguments.only or _SECTIONS)]
    for name in wanted:
        share, time_section = _SECTIONS[name]
        section = budget.section(_LAST if name == wanted[-1] else share)
        if apart:
            part = partial(run_apart, name, partial(_command, name, arguments, journal), section, journal)
        else:
            part = partial(time_section, _prepared(device, section, journal, arguments))
        _guarded(name, journal, part)


def _command(name: str, arguments: argparse.Namespace, journal: Journal, seconds: float) -> list[str]:
    """What runs a section of this run in another process."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "bench", "--section", name, "--device", arguments.device]
    command += ["--out", str(journal.path.resolve()), "--budget-seconds", str(seconds)]
    command += ["--match", *arguments.match] if arguments.match else []
    return [*command, "--quick"] if arguments.quick else command


def _prepared(device: torch.device, section: Budget, journal: Journal, arguments: argparse.Namespace) -> Bench:
    return Bench(Clock(device, most=2 if arguments.quick else 20), section, journal, arguments.quick, arguments.match)


def _measure_rates(bench: Bench) -> None:
    """Ceilings of this device, measured in this run."""
    operations = matrix_rate(bench.clock, torch.bfloat16, 256 if bench.quick else 8192)
    bandwidth = copy_bandwidth(bench.clock, 2**22 if bench.quick else 2**30)
    bench.journal.write("rates", bfloat16=operations, copy_bytes_per_second=bandwidth)
    print(f"  bfloat16 product {operations / 1e12:.1f} TFLOP/s, copy {bandwidth / 1e12:.3f} TB/s", flush=True)


_SECTIONS: dict[str, tuple[float, Callable[[Bench], None]]] = {
    "rates": (0.2, _measure_rates),
    "attention": (0.6, kernels.time_attention),
    "training": (0.5, language_model.time_training),
    "decoding": (0.5, generated_tokens.time_decoding),
}
"""Each section of `bench` and its share of what is left when it begins; what one does not use is the next one's."""


if __name__ == "__main__":
    sys.exit(main())
