"""The short table at the end of a run."""

from typing import Any

from benchmarks.gpu.attention import SDPA
from benchmarks.journal import Journal

_COLUMNS = {
    "linear r=32 local=1024": "linear 32/1024",
    "linear r=32 local=256": "linear 32/256",
    "linear r=64 local=1024": "linear 64/1024",
    "linear r=32 local=1024 tf32": "32/1024 tf32",
    "polysketch r=32 local=1024": "polysketch",
    "polynomial degree=4": "polynomial",
}


def print_table(journal: Journal) -> None:
    """Times against the fastest fused kernel, training, decoding, what failed and what was left out."""
    for direction in ("forward", "forward+backward"):
        for one in (False, True):
            _print_times(journal, direction, batch_one=one)
    for kind in ("train", "decode"):
        for record in journal.of(kind):
            print(_model_line(kind, record))
    _print_failures(journal)


def _print_times(journal: Journal, direction: str, *, batch_one: bool) -> None:
    records = [one for one in journal.of("time") if one["direction"] == direction and (one["batch"] == 1) is batch_one]
    if not records:
        return
    tokens = "batch 1" if batch_one else f"{records[0]['batch'] * records[0]['length']:,} tokens"
    print(f"{direction}, {tokens}: ms, and times as fast as the fastest fused kernel")
    print(f"{'length':>8} {'fused':>10} " + " ".join(f"{title:>16}" for title in _COLUMNS.values()))
    for length in sorted({record["length"] for record in records}):
        seconds = {one["series"]: one["seconds"] for one in records if one["length"] == length}
        fused = min((seconds[name] for name in SDPA if name in seconds), default=None)
        cells = [_cell(seconds.get(name), fused) for name in _COLUMNS]
        print(f"{length:>8} {_milliseconds(fused):>10} " + " ".join(f"{cell:>16}" for cell in cells))


def _cell(seconds: float | None, fused: float | None) -> str:
    speed = f" x{fused / seconds:.2f}" if seconds and fused else ""
    return _milliseconds(seconds) + speed


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _model_line(kind: str, record: dict[str, Any]) -> str:
    where = f"{record['batch']} x {record.get('length', record.get('position'))}"
    extra = _size("peak", record.get("peak_bytes")) + _size("state", record.get("state_bytes"))
    share = record["floor_seconds"] / record["seconds"]
    return (
        f"{kind:>6} {record['mechanism']:>10} {where:>12} {record['seconds'] * 1e3:9.2f} ms"
        f" {record['tokens_per_second']:12,.0f} tokens/s  {share:6.1%} of floor{extra}"
    )


def _size(name: str, size: int | None) -> str:
    return "" if size is None else f"  {name} {size / 2**20:,.1f} MiB"


def _print_failures(journal: Journal) -> None:
    for record in journal.of("failed"):
        case = ", ".join(str(value) for name, value in record.items() if name not in ("kind", "out_of_memory"))
        print(f"failed: {case}"[:160])
    skipped = [record for record in journal.of("skipped") if record["reason"].startswith("no time")]
    if skipped:
        print(f"left out for lack of time: {len(skipped)} cases, named in {journal.path}")
    for crash in journal.of("crashed"):
        print(f"CRASHED: {crash['part']}: {crash['error']}")
    checks = journal.of("check")
    wrong = [check for check in checks if not check["passed"]]
    for check in wrong:
        print(f"WRONG: {check['name']}: {check.get('error') or (check['worst'], check['relative_error'])}")
    print(f"correctness: {len(checks) - len(wrong)} of {len(checks)} checks passed")
