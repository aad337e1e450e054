"""How attention gains by threads: few heads, many heads, long batches; measured here, and by arithmetic up to 64.

    python -m benchmarks.threads                 results in benchmarks/results/threads-TIME.json

    python -m benchmarks.threads --ways learned polysketch --backward --shapes 1x12x4096

Float32, heads of 64; features of 32 given or mechanisms, as of `polysketch benchmark attention --mechanisms`, and SDPA.
Numbers of threads take turns. The arithmetic, of features given, forward, counts the pieces of work that the library
makes for so many threads: all pieces are alike, a thread takes whole ones, and a head that is cut into spans has half
as much work again. It says what no machine of so many cores can exceed. A section of `python -m benchmarks` too.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import RESULTS
from benchmarks.figures import Figure, Found
from benchmarks.journal import stamped
from polysketch.benchmarking import AttentionSettings, Workbench, calls
from polysketch.benchmarking.attention_alone import check_agreement
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.timing import Clock, ratio
from polysketch.benchmarking.way_names import GIVEN, Sizes, with_baseline
from polysketch.benchmarking.ways import way
from polysketch.benchmarking.workbench import save
from polysketch.ops.linear.spans import num_spans

SIZES, WIDTH = Sizes(sketch_size=32, local=256), 64
BOTH = ("forward", "forward+backward")
ONE_CORE = "gain by threads: one core"
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


@dataclass(frozen=True, kw_only=True)
class ThreadSettings:
    """What is timed by one and by two threads.

    Attributes:
        shapes: of heads of 64.
        ways: to attend, SDPA besides; names of `polysketch.benchmarking.way_names`.
        directions: forward, forward+backward.
    """

    shapes: tuple[Shape, ...] = SHAPES
    ways: tuple[str, ...] = (GIVEN, "learned", "polysketch")
    directions: tuple[str, ...] = BOTH


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    directions, load_before = (BOTH if arguments.backward else BOTH[:1]), load()
    rows = [
        row
        for shape in arguments.shapes
        for direction in directions
        for row in rows_of(shape, arguments.threads, arguments.repeats, ways=arguments.ways, direction=direction)
    ]
    described = {"environment": environment(torch.device("cpu")), "load_before": load_before, "load_after": load()}
    path = arguments.out or RESULTS / stamped("threads", ".json")
    save({"benchmark": "threads", **described, "measurements": rows}, path)
    shown = ("shape", "direction", "series", "threads", "ms", "gain", "at_most")
    print_table([{name: str(row[name]) for name in shown} for row in rows])
    print(f"record: {path}")
    return 0


def section(bench: Workbench, settings: Sequence[Any]) -> Found:
    """What two threads gain over one; with one core a line."""
    if cores() == 1:
        return Found(skipped=[ONE_CORE])
    rows = [row for of in settings for row in _rows_in_section(bench, of)]
    return Found([_figure(row) for row in rows if row["threads"] == 2], rows=rows)


def _rows_in_section(bench: Workbench, of: ThreadSettings) -> list[dict[str, Any]]:
    """Of a checked way to attend alone."""
    for heads in dict.fromkeys(shape.heads for shape in of.shapes):
        lengths = tuple(shape.length for shape in of.shapes if shape.heads == heads)
        backward = "forward+backward" in of.directions
        check_agreement(bench, AttentionSettings(lengths=lengths, mechanisms=of.ways, heads=heads, backward=backward))
    return [
        row
        for shape in of.shapes
        for direction in of.directions
        for row in rows_of(shape, (1, 2), bench.repeats, ways=of.ways, direction=direction, say=bench.progress)
    ]


def _figure(row: dict[str, Any]) -> Figure:
    name = f"2 threads, {row['shape']}, {row['direction']}, {row['series']}: times as fast as 1"
    allowed = row["at_most"] and f", at most {row['at_most']} by arithmetic, {row['of_64']} with 64"
    return Figure(name, row["gain"], note=f"{row['ms']} ms{allowed}")


def rows_of(
    shape: Shape,
    threads: Sequence[int],
    repeats: int,
    *,
    ways: Sequence[str] = (GIVEN,),
    direction: str = "forward",
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each way and number of threads: seconds, gain over the first number, and what arithmetic allows.

    Arithmetic is of features given, forward, and up to 64 threads has a row of its own; where it says nothing it is "".
    """
    rows = []
    for series, call in _calls(shape, ways, direction).items():
        seconds = _alternating(call, threads, repeats)
        counted = series == way(GIVEN, SIZES).title and direction == "forward"
        for count in threads:
            found: dict[str, Any] = {"shape": str(shape), "direction": direction, "series": series, "threads": count}
            found |= {"seconds": statistics.median(seconds[count]), "all_seconds": seconds[count]}
            gain = ratio(seconds[threads[0]], seconds[count])
            found |= {"ms": round(found["seconds"] * 1e3, 2), "gain": round(gain, 2)}
            allowed = {"at_most": most(shape, count), "of_64": most(shape, 64)} if counted else {}
            rows.append(found | {name: round(allowed[name], 1) if allowed else "" for name in ("at_most", "of_64")})
        say(f"threads, {shape}, {direction}, {series}: {found['seconds']:.3g} s with {count}")
    if GIVEN not in ways or direction != "forward":
        return rows
    bounds = {count: round(most(shape, count), 1) for count in MANY}
    return [*rows, {**rows[0], "series": "by arithmetic", "threads": "", "ms": "", "gain": "", "at_most": bounds}]


def most(shape: Shape, threads: int) -> float:
    """The largest gain over one thread that the pieces of work allow."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        spans = num_spans(torch.empty(*shape, SIZES.sketch_size, device="cpu"), SIZES.local)
    finally:
        torch.set_num_threads(before)
    pieces = shape.batch * shape.heads * spans
    turns = -(-pieces // threads)
    return pieces / turns / (_FOLDED_TWICE if spans > 1 else 1.0)


def _alternating(call: Callable[[], Any], threads: Sequence[int], repeats: int) -> dict[int, list[float]]:
    """Seconds by number of threads; each round has every number once."""
    clock, before = Clock(torch.device("cpu")), torch.get_num_threads()
    seconds: dict[int, list[float]] = {count: [] for count in threads}
    try:
        for place in range(repeats + 1):
            for count in threads:
                torch.set_num_threads(count)
                spent = clock.once(call)
                if place:  # the first round warms up
                    seconds[count].append(spent)
    finally:
        torch.set_num_threads(before)
    return seconds


def _calls(shape: Shape, ways: Sequence[str], direction: str) -> dict[str, Callable[[], Any]]:
    """By title: the ways, and PyTorch's fastest softmax attention of as many tokens."""
    torch.manual_seed(0)
    prepare = calls.forward if direction == "forward" else calls.forward_backward
    sizes = AttentionSettings(batch=shape.batch, heads=shape.heads, head_dim=WIDTH).shape(shape.length)
    ours = [way(name, SIZES) for name in with_baseline(ways)]
    return {one.title: prepare(one.prepare(sizes, torch.device("cpu"), torch.float32)) for one in ours}


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = [count for count in MANY if count <= cores()]
    parser.add_argument("--threads", type=int, nargs="+", default=here, help="numbers of them; the first is the base")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    shape = lambda text: Shape(*map(int, text.split("x")))  # noqa: E731
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="BATCHxHEADSxLENGTH")
    parser.add_argument("--ways", nargs="+", default=[GIVEN], help="given, learned, random or mechanisms")
    parser.add_argument("--backward", action="store_true", help="time forward and backward too")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
