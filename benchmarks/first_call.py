"""The first call of an op in an installed wheel: by the programs that it brings, or by those that are compiled then.

    make wheel && python -m venv /tmp/fresh && /tmp/fresh/bin/pip install dist/polysketch-*.whl
    python -m benchmarks.first_call /tmp/fresh/bin/python

Processes alternate, each with an empty cache. Seconds are the wall's, and those that the process and its compiler
computed. Writes benchmarks/results/first-call-TIME.json. As a section of `python -m benchmarks` no wheel is made: its
file for this processor is compiled, and lies where this checkout looks for those of a wheel.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, ROOT
from benchmarks.figures import Figure, Found
from benchmarks.journal import stamped
from polysketch.benchmarking import Workbench
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save
from polysketch.ops.native.compiler import compile_for_wheel, find_compiler

CALL = """
import sys, time
from pathlib import Path
import torch
from polysketch import ops
from polysketch.ops.native import shipped
if sys.argv[1]:
    shipped._CODE = Path(sys.argv[1]) / "shipped.py"
query, value = torch.rand(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
started = time.perf_counter()
ops.linear_attention(query, query, value, power=2, causal=True, offset=1.0, backend="native")
print(time.perf_counter() - started)
"""

NOWHERE = Path("nowhere")
"""A folder of no shipped programs."""

SOURCE = ROOT / "src"


@dataclass(frozen=True, kw_only=True)
class FirstCallSettings:
    """How many first calls.

    Attributes:
        shipped: by the programs of a wheel.
        compiled: by programs that are compiled then; half a minute each.
    """

    shipped: int = 3
    compiled: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    report: dict[str, Any] = {
        "benchmark": "first call",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
    }
    places = {"shipped": None, "compiled": NOWHERE}
    rounds = [{way: once(arguments.python, place) for way, place in places.items()} for _ in range(arguments.repeats)]
    report["rounds"] = rounds
    report["medians"] = {
        way: {clock: round(statistics.median(each[way][clock] for each in rounds), 4) for clock in ("wall", "own")}
        for way in rounds[0]
    }
    path = arguments.out or RESULTS / stamped("first-call", ".json")
    save({**report, "load_after": load()}, path)
    print_table(
        [{"programs": way, **{k: str(v) for k, v in clocks.items()}} for way, clocks in report["medians"].items()]
    )
    print(f"record: {path}")
    return 0


def section(bench: Workbench, settings: Sequence[Any]) -> Found:
    """The first call of this checkout by programs as a wheel brings them, and by those that are compiled then."""
    (of,) = settings
    try:
        find_compiler()
    except RuntimeError as error:
        return Found(skipped=[f"the first call: {error}"])
    with tempfile.TemporaryDirectory() as folder:
        bench.progress("first call: compiling what a wheel brings")
        programs = shipped_programs(Path(folder))
        rows = _calls("shipped", programs, of.shipped, bench) + _calls("compiled", NOWHERE, of.compiled, bench)
    ways = {
        "shipped": "first call of an op, programs of a wheel",
        "compiled": "first call of an op, programs compiled then",
    }
    return Found([_figure(title, [row for row in rows if row["way"] == way]) for way, title in ways.items()], rows=rows)


def shipped_programs(folder: Path) -> Path:
    """The folder, with the programs for this processor in it as a wheel has them beside its code."""
    (folder / "shipped.py").touch()
    source = SOURCE / "polysketch" / "ops" / "native" / "source"
    for path in compile_for_wheel(source, folder, torch.backends.cpu.get_cpu_capability()):
        path.chmod(0o644)
    return folder


def _calls(way: str, programs: Path, count: int, bench: Workbench) -> list[dict[str, Any]]:
    rows = []
    for _ in range(count):
        rows.append({"way": way, **once(Path(sys.executable), programs, source=SOURCE)})
        bench.progress(f"first call, {way}: {rows[-1]['wall']:.3g} s")
    return rows


def _figure(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    computed = statistics.median(row["own"] for row in rows)
    note = f"{computed:.3g} s of cores, with the start of Python and PyTorch"
    return Figure(title, statistics.median(row["wall"] for row in rows), "s", note=note)


def once(python: Path, programs: Path | None, *, source: Path | None = None) -> dict[str, float]:
    """Seconds of one first call: `wall` of the call, `own` of the whole process and its compiler.

    Args:
        python: the interpreter.
        programs: folder where shipped ones are looked for; None for that of the package.
        source: the folder that holds the package; None where the interpreter has it installed.
    """
    with tempfile.TemporaryDirectory() as cache:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        inherited |= {} if source is None else {"PYTHONPATH": str(source)}
        before = _own()
        done = subprocess.run(
            [python, "-W", "ignore", "-c", CALL, "" if programs is None else str(programs)],
            env={**inherited, "XDG_CACHE_HOME": cache},
            cwd=cache,
            capture_output=True,
            text=True,
            check=True,
        )
        return {"wall": float(done.stdout), "own": _own() - before}


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", type=Path, help="of the environment with the wheel")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
