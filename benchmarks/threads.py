"""How attention gains by threads: few heads, many heads, long batches; measured here, and by arithmetic up to 64.

    python -m benchmarks.threads                 results in benchmarks/results/threads-TIME.json

Forward, float32, features of 32, heads of 64, exact chunks of 256. Numbers of threads take turns. The arithmetic counts
the pieces of work that the library makes for so many threads: all pieces are alike, a thread takes whole ones, and a
head that is cut into spans has half as much work again. It says what no machine of so many cores can exceed.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch import ops
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.timing import Clock, ratio
from polysketch.benchmarking.workbench import save
from polysketch.ops.linear.spans import num_spans

FEATURES, WIDTH, CHUNK = 32, 64, 256
MANY = (1, 2, 4, 8, 16, 32, 64)
_FOLDED_TWICE = 1.5
"""Work of a head in spans, over that of a head in one piece."""


class Shape(NamedTuple):
    """What a call attends to."""

    batch: int
    heads: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} x {self.length}"


SHAPES = (Shape(1, 1, 16_384), Shape(1, 2, 16_384), Shape(1, 12, 16_384), Shape(64, 12, 512))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    before, load_before = torch.get_num_threads(), load()
    try:
        rows = [row for shape in arguments.shapes for row in rows_of(shape, arguments.threads, arguments.repeats)]
    finally:
        torch.set_num_threads(before)
    described = {"environment": environment(torch.device("cpu")), "load_before": load_before, "load_after": load()}
    path = arguments.out or RESULTS / stamped("threads", ".json")
    save({"benchmark": "threads", **described, "measurements": rows}, path)
    print_table(
        [{name: str(row[name]) for name in ("shape", "series", "threads", "ms", "gain", "at_most")} for row in rows]
    )
    print(f"record: {path}")
    return 0


def rows_of(shape: Shape, threads: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each way and number of threads: seconds, gain over the first number, and what arithmetic allows."""
    rows = []
    for series, call in _calls(shape).items():
        seconds = _alternating(call, threads, repeats)
        for count in threads:
            found: dict[str, Any] = {"shape": str(shape), "direction": "forward", "series": series, "threads": count}
            found |= {"seconds": statistics.median(seconds[count]), "all_seconds": seconds[count]}
            found |= {
                "ms": round(found["seconds"] * 1e3, 2),
                "gain": round(ratio(seconds[threads[0]], seconds[count]), 2),
            }
            rows.append(found | {"at_most": round(most(shape, count), 1) if series == "polysketch" else ""})
    bounds = {count: round(most(shape, count), 1) for count in MANY}
    return [*rows, {**rows[0], "series": "by arithmetic", "threads": "", "ms": "", "gain": "", "at_most": bounds}]


def most(shape: Shape, threads: int) -> float:
    """The largest gain over one thread that the pieces of work allow."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        spans = num_spans(torch.empty(shape.batch, shape.heads, shape.length, FEATURES, device="cpu"), CHUNK)
    finally:
        torch.set_num_threads(before)
    pieces = shape.batch * shape.heads * spans
    turns = -(-pieces // threads)
    return pieces / turns / (_FOLDED_TWICE if spans > 1 else 1.0)


def _alternating(call: Callable[[], Tensor], threads: Sequence[int], repeats: int) -> dict[int, list[float]]:
    """Seconds by number of threads; each round has every number once."""
    clock = Clock(torch.device("cpu"))
    seconds: dict[int, list[float]] = {count: [] for count in threads}
    for place in range(repeats + 1):
        for count in threads:
            torch.set_num_threads(count)
            spent = clock.once(call)
            if place:  # the first round warms up
                seconds[count].append(spent)
    return seconds


def _calls(shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """Ours, and PyTorch's fastest softmax attention of the same tokens."""
    features = [torch.rand(*shape, FEATURES) / FEATURES**0.5 for _ in range(2)]
    query, key, value = (torch.randn(*shape, WIDTH) for _ in range(3))
    local = ops.LocalPolynomial(query / WIDTH**0.5, key, 4, CHUNK)

    def polysketch() -> Tensor:
        with torch.no_grad():
            return ops.linear_attention(*features, value, power=2, causal=True, offset=1.0, local=local).output

    def sdpa() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return {"polysketch": polysketch, "sdpa": sdpa}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = [count for count in MANY if count <= cores]
    parser.add_argument("--threads", type=int, nargs="+", default=here, help="numbers of them; the first is the base")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    shape = lambda text: Shape(*map(int, text.split("x")))  # noqa: E731
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="BATCHxHEADSxLENGTH")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
