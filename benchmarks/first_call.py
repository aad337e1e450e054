"""The first call of an op in an installed wheel: by the programs that it brings, or by those that are compiled then.

    make wheel && python -m venv /tmp/fresh && /tmp/fresh/bin/pip install dist/polysketch-*.whl
    python -m benchmarks.first_call /tmp/fresh/bin/python

Processes alternate, each with an empty cache. Seconds are the wall's, and those that the process and its compiler
computed. Writes benchmarks/results/first-call-TIME.json.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save

CALL = """
import sys, time
from pathlib import Path
import torch
from polysketch import ops
from polysketch.ops.native import shipped
if sys.argv[1] == "compiled":
    shipped._CODE = Path("nowhere") / "shipped.py"
query, value = torch.rand(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
started = time.perf_counter()
ops.linear_attention(query, query, value, power=2, causal=True, offset=1.0, backend="native")
print(time.perf_counter() - started)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    report: dict[str, Any] = {
        "benchmark": "first call",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
    }
    rounds = [{way: once(arguments.python, way) for way in ("shipped", "compiled")} for _ in range(arguments.repeats)]
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


def once(python: Path, way: str) -> dict[str, float]:
    """Seconds of one first call: `wall` of the call, `own` of the whole process and its compiler."""
    with tempfile.TemporaryDirectory() as cache:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        before = _own()
        done = subprocess.run(
            [python, "-W", "ignore", "-c", CALL, way],
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
