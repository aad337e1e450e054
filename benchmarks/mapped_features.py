"""Mechanisms of power 1 with their feature maps, one thread: the floor of products, and another checkout.

    python -m benchmarks.mapped_features --before ../before/src

The checkouts take turns, a process for each round, in which the mechanisms take turns. Milliseconds are of the
process's own time, medians over its calls, then over the rounds. The floor of `performer` and `llops` is the products
of their maps and 4 n m (h + 1) operations a head for the sums, with backward 2.5 times as many more for the sums, and
for the maps once (`performer`) or three times (`llops`), over the rate of a product of two matrices of 1024 rows in
the same process: operations alone, no bytes. Writes benchmarks/results/mapped-features-TIME.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save

HERE = Path(__file__).parents[1] / "src"
HEADS, TOKENS, WIDTH, FEATURES = 4, 16_384, 64, 256
MAPS = {"performer": 1, "llops": 4}
"""Products of WIDTH by FEATURES for a query or key."""
MAPS_BACKWARD, SUMS_BACKWARD = {"performer": 1, "llops": 3}, 2.5

# The process of one round: it must run with the code of another checkout too.
ROUND = """
import json, statistics, sys, time
import torch
from polysketch import attention
torch.set_num_threads(1)
heads, tokens, width, calls = map(int, sys.argv[1:5])
torch.manual_seed(0)
built = {name: attention.build(name, num_heads=heads, head_dim=width) for name in sys.argv[5:]}
inputs = [torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3)]
matrix = torch.randn(1024, 1024)

def forward(mechanism):
    with torch.no_grad():
        return mechanism(*inputs, causal=True)

def with_backward(mechanism):
    output = mechanism(*inputs, causal=True)
    leaves = [*inputs, *mechanism.parameters()]
    torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)

def rate(_):
    with torch.no_grad():
        return matrix @ matrix

times = {name: {"rate": [], "forward": [], "with_backward": []} for name in built}
for call in range(calls + 1):
    for name, mechanism in built.items():
        for way, function in (("rate", rate), ("forward", forward), ("with_backward", with_backward)):
            start = time.process_time()
            function(mechanism)
            if call:
                times[name][way].append(time.process_time() - start)
medians = {name: {way: statistics.median(found) for way, found in ways.items()} for name, ways in times.items()}
print(json.dumps([{"mechanism": name, **ways, "rate": 2 * 1024**3 / ways["rate"]} for name, ways in medians.items()]))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    sources = {"after": HERE} | ({"before": arguments.before} if arguments.before else {})
    report: dict[str, Any] = {
        "benchmark": "mapped features",
        "environment": {**environment(torch.device("cpu")), "threads": 1},
        "load_before": load(),
        "shape": {"heads": HEADS, "tokens": TOKENS, "width": WIDTH, "features": FEATURES},
    }
    report["rounds"] = [
        {"source": name, "round": number, **one}
        for number in range(arguments.repeats)
        for name, source in sources.items()
        for one in once(source, arguments.mechanisms, arguments.calls)
    ]
    report["medians"] = rows = medians(report["rounds"])
    path = arguments.out or RESULTS / stamped("mapped-features", ".json")
    save({**report, "load_after": load()}, path)
    names = dict.fromkeys(name for row in rows for name in row)
    print_table([{name: str(row.get(name, "")) for name in names} for row in rows])
    print(f"record: {path}")
    return 0


def once(source: Path, mechanisms: Sequence[str], calls: int) -> list[dict[str, Any]]:
    """Of each mechanism: seconds `forward` and `with_backward`, `rate` of a product in operations a second."""
    sizes = map(str, (HEADS, TOKENS, WIDTH, calls))
    inherited = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", ROUND, *sizes, *mechanisms]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def medians(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each mechanism and source: milliseconds, and, where it is counted, the floor's share in percent.

    In rows of this checkout, how many times as fast it is as the other one, the median of the ratios of all rounds.
    """
    rows = []
    for mechanism, name in dict.fromkeys((entry["mechanism"], entry["source"]) for entry in rounds):
        own, other = (_of(rounds, mechanism, source) for source in (name, "before"))
        row: dict[str, Any] = {"mechanism": mechanism, "source": name}
        for way in ("forward", "with_backward"):
            row[way] = round(statistics.median(one[way] for one in own) * 1e3, 1)
            if mechanism in MAPS:
                least = operations(mechanism, backward=way != "forward")
                row[f"{way}_share"] = round(100 * statistics.median(least / one["rate"] / one[way] for one in own))
            if name == "after" and other:
                ratios = [before[way] / after[way] for before, after in zip(other, own, strict=True)]
                row[f"{way}_times_as_fast"] = round(statistics.median(ratios), 2)
        rows.append(row)
    return rows


def operations(mechanism: str, *, backward: bool) -> float:
    """Floating-point operations that it cannot do without."""
    maps = 2 * 2 * HEADS * TOKENS * MAPS[mechanism] * WIDTH * FEATURES
    sums = 4 * HEADS * TOKENS * FEATURES * (WIDTH + 1)
    return maps * (1 + MAPS_BACKWARD[mechanism] * backward) + sums * (1 + SUMS_BACKWARD * backward)


def _of(rounds: Sequence[dict[str, Any]], mechanism: str, source: str) -> list[dict[str, Any]]:
    return [one for one in rounds if (one["mechanism"], one["source"]) == (mechanism, source)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="the folder src of another checkout")
    parser.add_argument("--mechanisms", nargs="+", default=[*MAPS])
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--calls", type=int, default=3, help="of a round, after one that is not counted")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
