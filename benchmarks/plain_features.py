"""Linear attention over features that stand for themselves (power 1), one thread: the floor, and another checkout.

    python -m benchmarks.plain_features --before ../before/src

The checkouts take turns, a process for each round. Milliseconds are of the process's own time, medians over
its calls, then over the rounds. The floor is 4 n m (h + 1) operations a head forward, with backward two and a half
times as many more, over the rate of a product of two matrices of 1024 rows in the same process: operations alone, no
bytes. The target is 70 % of it, reached or MISSED. Where onnx and onnxruntime are installed, ONNX Runtime's operator
LinearAttention runs beside it on the same numbers, forward, with one thread; its output is compared first, and twice
its speed is the target. Writes benchmarks/results/plain-features-TIME.json. A section of `python -m benchmarks` too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, onnx_linear_attention, targets
from benchmarks.figures import Figure, Found
from benchmarks.journal import stamped
from polysketch.benchmarking import Workbench
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save

HERE = Path(__file__).parents[1] / "src"
HEADS, VALUE_WIDTH, BACKWARD = 4, 64, 2.5
WITHOUT_ONNX = "power 1 against ONNX Runtime's LinearAttention: onnx and onnxruntime are not installed"


@dataclass(frozen=True, kw_only=True)
class PlainFeatureSettings:
    """What is timed.

    Attributes:
        features: widths.
        tokens: of each head.
        repeats: rounds, of a process each.
        calls: of a round, after one that warms up.
    """

    features: tuple[int, ...] = (64, 256, 1_024)
    tokens: int = 4_096
    repeats: int = 3
    calls: int = 7


# The process of one round: it must run with the code of another checkout too.
ROUND = """
import json, statistics, sys, time
import torch
from benchmarks import onnx_linear_attention
from polysketch.ops import linear_attention
torch.set_num_threads(1)
heads, tokens, width, calls, *widths = map(int, sys.argv[1:])

def median(call):
    call()
    times = []
    for _ in range(calls):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)

matrix = torch.randn(1024, 1024)

def by_onnx_runtime(query, key, value):
    if not onnx_linear_attention.installed():
        return {}
    other = onnx_linear_attention.OnnxLinearAttention(query, key, value)
    expected = linear_attention(query, key, value, power=1, causal=True, normalize=False).output
    torch.testing.assert_close(other.output(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    return {"onnx_runtime": median(other)}

def measured(features):
    query, key = (torch.rand(1, heads, tokens, features, requires_grad=True) for _ in range(2))
    value = torch.randn(1, heads, tokens, width, requires_grad=True)

    def forward():
        return linear_attention(query, key, value, power=1, causal=True).output

    def forward_and_backward():
        output = forward()
        torch.autograd.grad(output, (query, key, value), torch.ones_like(output))

    with torch.no_grad():
        found = {"rate": 2 * 1024**3 / median(lambda: matrix @ matrix), "forward": median(forward)}
        found |= by_onnx_runtime(query, key, value)
    return {"features": features, **found, "with_backward": median(forward_and_backward)}

print(json.dumps([measured(features) for features in widths]))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    sources = {"after": HERE} | ({"before": arguments.before} if arguments.before else {})
    settings = PlainFeatureSettings(
        features=tuple(arguments.features), repeats=arguments.repeats, calls=arguments.calls
    )
    report: dict[str, Any] = {
        "benchmark": "plain features",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
        "shape": {"heads": HEADS, "tokens": settings.tokens, "value_width": VALUE_WIDTH},
    }
    report["rounds"] = [
        {"source": name, **of_width}
        for _ in range(settings.repeats)
        for name, source in sources.items()
        for of_width in once(source, settings)
    ]
    report["medians"] = rows = medians(report["rounds"], settings.tokens)
    path = arguments.out or RESULTS / stamped("plain-features", ".json")
    found = figures(rows)
    report["figures"] = [figure.as_json() for figure in found]
    save({**report, "load_after": load()}, path)
    print_table([{name: str(entry) for name, entry in row.items()} for row in rows])
    print("", *(line for figure in found for line in figure.lines), *skipped(), sep="\n")
    print(f"record: {path}")
    return 0


def section(bench: Workbench, settings: Sequence[Any]) -> Found:
    """The shares of the floor, and ONNX Runtime's time over ours where it is installed; of this checkout."""
    (of,) = settings
    rounds = []
    for turn in range(of.repeats):
        rounds += [{"source": "after", **of_width} for of_width in once(HERE, of)]
        bench.progress(f"power 1, round {turn + 1} of {of.repeats}")
    rows = medians(rounds, of.tokens)
    return Found(figures(rows), rows=[*rows, *rounds], skipped=skipped())


def skipped() -> list[str]:
    """A line where ONNX Runtime is not installed."""
    return [] if onnx_linear_attention.installed() else [WITHOUT_ONNX]


def once(source: Path, settings: PlainFeatureSettings) -> list[dict[str, float]]:
    """Of each width: seconds of a call `forward` and `with_backward`, `rate` of a product in operations a second.

    Where ONNX Runtime is installed, its seconds forward are `onnx_runtime`.
    """
    sizes = map(str, (HEADS, settings.tokens, VALUE_WIDTH, settings.calls, *settings.features))
    path = os.pathsep.join(map(str, (source.resolve(), Path(__file__).parents[1])))
    inherited = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", ROUND, *sizes]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def medians(rounds: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """A row for each width and source: milliseconds, those of the floor, and the floor's share of them in percent.

    With ONNX Runtime its milliseconds forward, and how many times as fast ours is.
    """
    rows = []
    for features, name in dict.fromkeys((entry["features"], entry["source"]) for entry in rounds):
        own = [entry for entry in rounds if (entry["features"], entry["source"]) == (features, name)]
        of = {key: statistics.median(entry[key] for entry in own) for key in ("rate", "forward", "with_backward")}
        floor = 4 * HEADS * tokens * features * (VALUE_WIDTH + 1) / of["rate"]
        row: dict[str, Any] = {"features": features, "source": name}
        for way, least in (("forward", floor), ("with_backward", floor * (1 + BACKWARD))):
            row |= {way: round(of[way] * 1e3, 1), f"{way}_floor": round(least * 1e3, 1)}
            row[f"{way}_share"] = round(100 * least / of[way])
        if all("onnx_runtime" in entry for entry in own):
            other = statistics.median(entry["onnx_runtime"] for entry in own)
            # Of each round, for the two took turns there.
            ratios = [entry["onnx_runtime"] / entry["forward"] for entry in own]
            row |= {"onnx_runtime": round(other * 1e3, 1), "times_as_fast": round(statistics.median(ratios), 2)}
        rows.append(row)
    return rows


def figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """The floor's share of this checkout's times; where ONNX Runtime is, how many times as fast ours is."""
    ours = [row for row in rows if row["source"] == "after"]
    shares = [(row, way) for row in ours for way in ("forward", "with_backward")]
    beside = [row for row in ours if "times_as_fast" in row]
    return [*(_share(row, way) for row, way in shares), *(_over_onnx_runtime(row) for row in beside)]


def _share(row: dict[str, Any], way: str) -> Figure:
    title = f"power 1, {row['features']:,} features, {way.replace('_', ' ')}: of the floor"
    note = f"{row[way]} ms, floor {row[f'{way}_floor']} ms, one thread"
    return Figure(title, row[f"{way}_share"], "%", targets.FLOOR_PERCENT, note)


def _over_onnx_runtime(row: dict[str, Any]) -> Figure:
    title = f"power 1, {row['features']:,} features, forward: times as fast as ONNX Runtime"
    return Figure(
        title, row["times_as_fast"], "x", targets.ONNX_RUNTIME, f"its LinearAttention: {row['onnx_runtime']} ms"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="the folder src of another checkout")
    parser.add_argument("--features", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--calls", type=int, default=7, help="of a round")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
