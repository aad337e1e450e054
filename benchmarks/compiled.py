"""Compile every Triton program at the shapes that matter, for sm_80, sm_90 and sm_100, without a device.

    python -m benchmarks.compiled                                   results in benchmarks/results/compiled-programs.csv
    python -m benchmarks.compiled --ops linear --targets sm_90 --dtypes bfloat16 --out /tmp/some.csv
    python -m benchmarks.compiled --match "r=32, h=64"              calls whose names contain that

A line for each program as it was launched: registers, spills, shared memory and tensor-core instructions. Exit status 1
where a program spills, takes more shared memory than its devices have, reads a register that nothing wrote, or does not
compile. Compiling takes a second or so a program; what was compiled before comes out of Triton's cache.
"""

import argparse
import csv
import io
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from polysketch.benchmarking.environment import commit
from polysketch.benchmarking.program_calls import DTYPES, OPS, ProgramCall, program_calls
from polysketch.benchmarking.tables import print_table
from polysketch.ops.triton.ahead_of_time import compile_call, complaints
from polysketch.storage import disk

TARGETS = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}
Row = dict[str, Any]

_BATCH, _HEADS, _LENGTH = 2, 8, 4_096
_SAME = ("target", "program", "dtype", "constants")
"""What makes it the same program; the row is of the first call that launched it."""


def rows_of(call: ProgramCall, target: str) -> list[Row]:
    """The programs of one call, forward and, where there is one, backward."""
    made = call.build(torch.device("meta"), _BATCH, _HEADS, _LENGTH)
    return [
        {
            "target": target,
            "program": one.name,
            "dtype": call.dtype,
            "call": call.name,
            "constants": json.dumps({name: str(value) for name, value in one.constants.items()}),
            "registers": one.registers,
            "spills": one.spills,
            "shared_bytes": one.shared,
            "tensor_core_instructions": one.tensor_core,
            "instructions": sum(one.opcodes.values()),
            "complaints": "; ".join(complaints(one, TARGETS[target])),
            "triton": metadata.version("triton"),
            "commit": commit()[:12],
        }
        for one in compile_call(lambda: call.passes(made)(), TARGETS[target])
    ]


def write(rows: Sequence[Row], path: Path) -> None:
    """As comma-separated values; the old file stays until the new one is whole."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace_file(path, text.getvalue().encode())


def print_summary(rows: Sequence[Row]) -> None:
    """For each program, dtype and target the largest of everything, and the fewest tensor-core instructions."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["program"], row["dtype"], row["target"]].append(row)
    table = []
    for key, group in sorted(groups.items()):
        most = {name: str(max(row[name] for row in group)) for name in ("registers", "spills", "shared_bytes")}
        fewest = str(min(row["tensor_core_instructions"] for row in group))
        named = dict(zip(("program", "dtype", "target"), key, strict=True))
        table.append({**named, "compiled": str(len(group)), **most, "tensor": fewest})
    print_table(table)
    for row in rows:
        if row["complaints"]:
            print("BAD {program}, {target}, {dtype} ({call}): {complaints}; {constants}".format_map(row))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what is asked for; the file is written after every call."""
    arguments = _parse(argv)
    wanted = [call for call in program_calls(arguments.ops, arguments.dtypes) if arguments.match in call.name]
    rows: dict[tuple, Row] = {}
    failed, started = 0, time.monotonic()
    for number, call in enumerate(wanted):
        for target in arguments.targets:
            try:
                for row in rows_of(call, target):
                    rows.setdefault(tuple(row[name] for name in _SAME), row)
            except Exception as error:  # noqa: BLE001 - one program that does not compile must not hide the others
                failed += 1
                print(f"FAILED {call.name}, {call.dtype}, {target}: {type(error).__name__}: {error}"[:300], flush=True)
        write([*rows.values()], arguments.out)
        spent = time.monotonic() - started
        print(f"  {number + 1}/{len(wanted)} {call.name}, {call.dtype}: {spent:.0f} s", flush=True)
    print_summary([*rows.values()])
    print(f"{failed} calls failed; {len(rows)} programs in {time.monotonic() - started:.0f} s, in {arguments.out}")
    return int(failed > 0 or any(row["complaints"] for row in rows.values()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.compiled", description=__doc__.partition("\n")[0])
    for name, known in (("--ops", OPS), ("--targets", TARGETS), ("--dtypes", DTYPES)):
        parser.add_argument(name, nargs="+", choices=tuple(known), default=tuple(known))
    parser.add_argument("--match", default="", help="only calls whose names contain this")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled-programs.csv")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
