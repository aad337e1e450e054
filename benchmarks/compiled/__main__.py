"""Compile every Triton program at the shapes that matter, for sm_80, sm_90 and sm_100, without a device.

    python -m benchmarks.compiled                                   results in benchmarks/results/compiled-programs.csv
    python -m benchmarks.compiled --ops linear --targets sm_90 --dtypes bfloat16 --out /tmp/some.csv
    python -m benchmarks.compiled --match "r=32, h=64" --forward    calls whose names contain that; no gradients
    python -m benchmarks.compiled --everything                      every size in every dtype; hours

A line for each program as it was launched: registers, spills, shared memory and tensor-core instructions. Exit status 1
where a program spills, or takes more shared memory than its devices have, or does not compile. Compiling takes a second
or so a program; what was compiled before comes out of Triton's cache.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.compiled.table import Line, failures, lines_of, print_summary, write
from polysketch.benchmarking.program_calls import DTYPES, OPS, program_calls

TARGETS = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what is asked for; the file is written after every call."""
    arguments = _parse(argv)
    calls = program_calls(arguments.ops, arguments.dtypes, everything=arguments.everything)
    calls = [call for call in calls if arguments.match in call.name]
    lines: dict[tuple, Line] = {}
    failed: list[str] = []
    started = time.monotonic()
    for number, call in enumerate(calls):
        for target in arguments.targets:
            try:
                found = lines_of(call, target, TARGETS[target], backward=not arguments.forward)
            except Exception as error:  # noqa: BLE001 - one program that does not compile must not hide the others
                failed.append(f"{call.name}, {call.dtype}, {target}: {type(error).__name__}: {error}"[:300])
                print(f"  FAILED {failed[-1]}", flush=True)
                continue
            for line in found:
                lines.setdefault(line.key, line)
        write(list(lines.values()), arguments.out)
        spent = time.monotonic() - started
        left = spent / (number + 1) * (len(calls) - number - 1)
        print(f"  {number + 1}/{len(calls)} {call.name}, {call.dtype}: {spent:.0f} s, {left:.0f} s left", flush=True)
    print_summary(list(lines.values()))
    for line in failed:
        print(f"FAILED {line}")
    print(f"{len(lines)} programs in {time.monotonic() - started:.0f} s; all of them in {arguments.out}")
    return 1 if failed or failures(list(lines.values())) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.compiled", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=tuple(OPS), default=tuple(OPS))
    parser.add_argument("--targets", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--match", default="", help="only calls whose names contain this")
    parser.add_argument("--everything", action="store_true", help="every size in every dtype, not in bfloat16 alone")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled-programs.csv")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
