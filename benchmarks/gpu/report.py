"""What a run shows at its end: short tables, and the measurements of its picture."""

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels import BIDIRECTIONAL
from benchmarks.gpu.targets import figures
from benchmarks.journal import Journal
from polysketch.benchmarking.tables import Row, megabytes, print_table
from polysketch.benchmarking.way_names import FUSED

_OUTPUT = " output_ratio"


def print_check(journal: Journal) -> None:
    """The largest errors beside the plain formula's by op, dtype and backend; then what is wrong, and how many."""
    checks = journal.of("check")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in checks:
        file, _, test = one["name"].partition("::")
        dtype = re.search(r"torch\.(\w+)", test)
        for backend in (name.removesuffix(_OUTPUT) for name in one if name.endswith(_OUTPUT)):
            key = Path(file).stem.removeprefix("test_"), dtype[1] if dtype else "", backend
            groups.setdefault(key, []).append(one)
    if groups:
        print("largest error over that of the plain formula in the same dtype (allowed: output 2, gradients 3)")
    print_table([_errors(key, found) for key, found in sorted(groups.items())])
    for one in journal.of("sanitizer"):
        said = {True: "nothing found", False: "FOUND ERRORS", None: f"no answer: {one.get('reason')}"}[one["passed"]]
        print(f"compute-sanitizer, memcheck: {said}")
    _print_failures(journal)
    wrong = [one for one in checks if not one["passed"]]
    for one in wrong:
        print(f"WRONG: {one['name']}: {one['error']}"[:300])
    print(f"correctness: {len(checks) - len(wrong)} of {len(checks)} tests passed")


def _errors(key: tuple[str, ...], found: Sequence[dict[str, Any]]) -> Row:
    op, dtype, backend = key
    kinds = {"output": f"{backend}{_OUTPUT}", "gradients": f"{backend} gradient_ratio"}
    largest = {kind: _largest([one[name] for one in found]) for kind, name in kinds.items()}
    return {"op": op, "dtype": dtype, "backend": backend, "cases": str(len(found)), **largest}


def _largest(values: Sequence[Any]) -> str:
    return f"{max(values):.2f}" if all(isinstance(value, float) for value in values) else "not finite"


def print_bench(journal: Journal) -> None:
    """Times against the fastest fused kernel, training, decoding, targets, what failed and what was left out."""
    for direction, one_sequence in itertools.product(("forward", "forward+backward"), (False, True)):
        times = [one for one in journal.of("time") if one["direction"] == direction]
        _print_times(direction, [one for one in times if (one["batch"] == 1) is one_sequence])
    print_table([_model_row(record) for record in (*journal.of("train"), *journal.of("decode"))])
    for name, figure in figures(journal).items():
        print(*(figure.lines if figure is not None else [f"{name:<80} not measured"]), sep="\n")
    _print_failures(journal)


def _print_times(direction: str, records: list[dict[str, Any]]) -> None:
    """A row a series, a column a length."""
    if not records:
        return
    tokens = "batch 1" if records[0]["batch"] == 1 else f"{records[0]['batch'] * records[0]['length']:,} tokens"
    print(f"{direction}, {tokens}: ms, times as fast as the fastest fused kernel, TFLOP/s")
    lengths = sorted({record["length"] for record in records})
    fused = {direct: _fused(records, direct) for direct in (False, True)}
    rows: dict[str, Row] = {}
    for one in records:
        row = rows.setdefault(one["series"], {"series": one["series"], **dict.fromkeys(map(str, lengths), "")})
        row[str(one["length"])] = _cell(one, fused[BIDIRECTIONAL in one["series"]].get(one["length"]))
    print_table(list(rows.values()))


def _fused(records: Sequence[dict[str, Any]], bidirectional: bool) -> dict[int, float]:
    """Length -> seconds of the fastest fused kernel."""
    names, fastest = [f"{name}{BIDIRECTIONAL if bidirectional else ''}" for name in FUSED], {}
    for one in records:
        if one["series"] in names:
            fastest[one["length"]] = min(one["seconds"], fastest.get(one["length"], math.inf))
    return fastest


def _cell(one: dict[str, Any], fused: float | None) -> str:
    speed = f" x{fused / one['seconds']:.2f}" if fused else ""
    return f"{one['seconds'] * 1e3:.2f}{speed} {one['tflops']:.0f}"


def _model_row(record: dict[str, Any]) -> Row:
    return {
        "": record["kind"],
        "model": record["model"],
        "batch": str(record.get("rows", record["batch"])),
        "length": str(record.get("length", record.get("position"))),
        "ms": f"{record['seconds'] * 1e3:.2f}",
        "tokens/s": f"{record['tokens_per_second']:,.0f}",
        "of the floor": f"{record['floor_seconds'] / record['seconds']:.1%}",
        "peak MB": megabytes(record.get("peak_bytes")),
        "state MB": megabytes(record.get("state_bytes")),
    }


def _print_failures(journal: Journal) -> None:
    for record in journal.of("failed"):
        case = ", ".join(str(value) for name, value in record.items() if name not in ("kind", "out_of_memory"))
        print(f"failed: {case}"[:160])
    skipped = [record for record in journal.of("skipped") if record["reason"].startswith("no time")]
    if skipped:
        print(f"left out for lack of time: {len(skipped)} cases, named in {journal.path}")
    for crash in journal.of("crashed"):
        print(f"CRASHED: {crash['part']}: {crash['error']}")


def measurements(journal: Journal) -> list[dict[str, Any]]:
    """Records of times as a picture wants them, without a panel of memory."""
    attention = sorted(journal.of("time"), key=lambda one: (one["direction"], one["batch"] == 1))
    decoding = sorted(journal.of("decode"), key=lambda one: one["largest"])
    found = [(one, f"{one['direction']}, {_batch(one, 'tokens held constant')}") for one in attention]
    found += [(one, "training step of gpt2-small") for one in journal.of("train")]
    found += [(one, f"decoding with gpt2-small, {_batch(one, 'largest batch that fits')}") for one in decoding]
    return [
        {
            **one,
            "direction": direction,
            "series": one.get("series", one.get("model")),
            "tokens": one["rows"] if "rows" in one else one["batch"] * one["length"],
            "peak_bytes": None,
        }
        for one, direction in found
    ]


def _batch(one: dict[str, Any], several: str) -> str:
    return "one sequence" if one["batch"] == 1 else several
