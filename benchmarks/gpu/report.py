"""What a run shows at its end: short tables, and the measurements of its picture."""

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.kernels import SDPA
from benchmarks.gpu.targets import figures
from benchmarks.journal import Journal

_OUTPUT = " output_ratio"
_COLUMNS = (
    *("features r=32", "features r=64", "random r=32", "learned r=32", "random r=64", "learned r=64"),
    "polynomial degree=4",
)


def print_check(journal: Journal) -> None:
    """The largest errors beside the plain formula's by op, dtype and backend; then what is wrong, and how many."""
    groups: dict[tuple[str, str, str], list[tuple[Any, Any]]] = {}
    for one in journal.of("check"):
        for backend in (name.removesuffix(_OUTPUT) for name in one if name.endswith(_OUTPUT)):
            ratios = one[backend + _OUTPUT], one[f"{backend} gradient_ratio"]
            groups.setdefault((_op(one), _dtype(one), backend), []).append(ratios)
    if groups:
        print("largest error over that of the plain formula in the same dtype (allowed: output 2, gradients 3)")
        print(f"{'':>16} {'dtype':>9} {'backend':>10} {'cases':>6} {'output':>8} {'gradients':>10}")
    for (op, dtype, backend), found in sorted(groups.items()):
        output, gradient = map(_largest, zip(*found, strict=True))
        print(f"{op:>16} {dtype:>9} {backend:>10} {len(found):>6} {output:>8} {gradient:>10}")
    for one in journal.of("sanitizer"):
        said = {True: "nothing found", False: "FOUND ERRORS", None: f"no answer: {one.get('reason')}"}[one["passed"]]
        print(f"compute-sanitizer, memcheck: {said}")
    _print_failures(journal)
    checks = journal.of("check")
    wrong = [one for one in checks if not one["passed"]]
    for one in wrong:
        print(f"WRONG: {one['name']}: {one['error']}"[:300])
    print(f"correctness: {len(checks) - len(wrong)} of {len(checks)} tests passed")


def _op(one: dict[str, Any]) -> str:
    """Of a test in test_linear.py: linear."""
    return one["name"].partition("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")


def _dtype(one: dict[str, Any]) -> str:
    found = re.search(r"torch\.(\w+)", one["name"])
    return found[1] if found else ""


def print_bench(journal: Journal) -> None:
    """Times against the fastest fused kernel, training, decoding, targets, what failed and what was left out."""
    for direction in ("forward", "forward+backward"):
        for one in (False, True):
            _print_times(journal, direction, batch_one=one)
    for kind in ("train", "decode"):
        for record in journal.of(kind):
            print(_model_line(kind, record))
    for name, figure in figures(journal).items():
        print(figure.line if figure is not None else f"{name:<66} not measured")
    _print_failures(journal)


def _largest(values: Sequence[Any]) -> str:
    return f"{max(values):.2f}" if all(isinstance(value, float) for value in values) else "not finite"


def _print_times(journal: Journal, direction: str, *, batch_one: bool) -> None:
    records = [one for one in journal.of("time") if one["direction"] == direction and (one["batch"] == 1) is batch_one]
    if not records:
        return
    tokens = "batch 1" if batch_one else f"{records[0]['batch'] * records[0]['length']:,} tokens"
    print(f"{direction}, {tokens}: ms, times as fast as the fastest fused kernel, TFLOP/s")
    print(f"{'length':>8} {'fused':>10} " + " ".join(f"{title:>19}" for title in _COLUMNS))
    for length in sorted({record["length"] for record in records}):
        found = {one["series"]: one for one in records if one["length"] == length}
        fused = min((found[name]["seconds"] for name in SDPA if name in found), default=None)
        cells = [_cell(found.get(name), fused) for name in _COLUMNS]
        print(f"{length:>8} {_milliseconds(fused):>10} " + " ".join(f"{cell:>19}" for cell in cells))


def _cell(one: dict[str, Any] | None, fused: float | None) -> str:
    if one is None:
        return "-"
    speed = f" x{fused / one['seconds']:.2f}" if fused else ""
    return f"{_milliseconds(one['seconds'])}{speed} {one['tflops']:.0f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _model_line(kind: str, record: dict[str, Any]) -> str:
    where = f"{record.get('rows', record['batch'])} x {record.get('length', record.get('position'))}"
    extra = _size("peak", record.get("peak_bytes")) + _size("state", record.get("state_bytes"))
    share = record["floor_seconds"] / record["seconds"]
    return (
        f"{kind:>6} {record['model']:>12} {where:>14} {record['seconds'] * 1e3:9.2f} ms"
        f" {record['tokens_per_second']:12,.0f} tokens/s  {share:6.1%} of floor{extra}"
    )


def _size(name: str, size: int | None) -> str:
    return "" if size is None else f"  {name} {size / 2**20:,.0f} MiB"


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
    """Records of times as a picture wants them."""
    attention = sorted(journal.of("time"), key=lambda one: (one["direction"], one["batch"] == 1))
    decoding = sorted(journal.of("decode"), key=lambda one: one["largest"])
    return [
        *(_point(one, f"{one['direction']}, {_batch(one, 'tokens held constant')}") for one in attention),
        *(_point(one, "training step of gpt2-small") for one in journal.of("train")),
        *(_point(one, f"decoding with gpt2-small, {_batch(one, 'largest batch that fits')}") for one in decoding),
    ]


def _batch(one: dict[str, Any], several: str) -> str:
    return "one sequence" if one["batch"] == 1 else several


def _point(one: dict[str, Any], direction: str) -> dict[str, Any]:
    tokens = one["rows"] if "rows" in one else one["batch"] * one["length"]
    kept = ("seconds", "floor_seconds", "length", "position")
    drawn: dict[str, Any] = {name: one[name] for name in kept if name in one}
    return {**drawn, "direction": direction, "series": one.get("series", one.get("model")), "tokens": tokens}
