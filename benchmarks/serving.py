"""What it brings to continue many requests together, and what they wait while a long prompt is read.

    python -m benchmarks.serving                            preset tiny, on one thread of this machine's CPU
    python -m benchmarks.serving --presets tiny gpt2-small --at-once 1 8 --rounds 5 --out /tmp/some.json

Every round measures each number of requests at once, one after the other, then steps of the largest number alone and
while a prompt is read beside them, a chunk a step. Seconds are those of the processor (`time.process_time`), so that
other programs on the machine take none of them. Figures are medians over the rounds. Writes
benchmarks/results/serving-TIME.json.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save
from polysketch.generation import Engine, Request, Sampler, bytes_of_request
from polysketch.models import TransformerLM, preset

_CHUNKS = (128, 512)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "benchmark": "serving",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
        "measurements": [],
    }
    path = arguments.out or RESULTS / stamped("serving", ".json")
    for name in arguments.presets:
        report["measurements"].append(measure(name, arguments.at_once, arguments.steps, arguments.rounds))
        save({**report, "load_after": load()}, path)
        measured = report["measurements"][-1]
        print_table([{"requests": str(key), "tokens a second": str(value)} for key, value in measured["speed"].items()])
        print_table([{key: str(value) for key, value in each.items()} for each in measured["steps_beside"]])
    print(f"record: {path}")
    return 0


def measure(name: str, at_once: Sequence[int], steps: int, rounds: int) -> dict[str, Any]:
    """The figures of one preset."""
    torch.manual_seed(0)
    model = TransformerLM(preset(name, attention="polysketch", attention_options={"window": 256})).eval()
    speeds: dict[int, list[float]] = {count: [] for count in at_once}
    waits: dict[int, list[tuple[float, float]]] = {chunk: [] for chunk in _CHUNKS}
    for _ in range(rounds + 1):
        for count in at_once:
            speeds[count].append(count / _step(running(model, count, steps, 512), steps))
        for chunk in _CHUNKS:
            waits[chunk].append(waiting(model, max(at_once), steps, chunk))
    return {
        "preset": name,
        "window": 256,
        "state_bytes": bytes_of_request(model),
        "rounds": rounds,
        "steps": steps,
        "speed": {count: round(statistics.median(found[1:]), 1) for count, found in speeds.items()},
        "steps_of": max(at_once),
        "steps_beside": [_medians(chunk, found[1:]) for chunk, found in waits.items()],
    }


def running(model: TransformerLM, count: int, steps: int, chunk: int) -> Engine:
    """An engine in which so many requests are continued, with room for another one, and will be for some steps."""
    engine = Engine(model, slots=count + 1, chunk=chunk)
    for seed in range(count):
        engine.add(Request([1 + seed % 256, 2, 3, 4], 3 * steps + count, Sampler(1.0), seed=seed))
    while engine.num_waiting:
        engine.step()
    return engine


def waiting(model: TransformerLM, count: int, steps: int, chunk: int) -> tuple[float, float]:
    """Seconds of a step alone, and of one beside which a chunk of a prompt is read."""
    engine = running(model, count, steps, chunk)
    alone = _step(engine, steps)
    engine.add(Request([5] * (chunk * steps + 1), 1))
    return alone, _step(engine, steps)


def _step(engine: Engine, steps: int) -> float:
    """Mean seconds of the processor of a step."""
    begun = time.process_time()
    for _ in range(steps):
        engine.step()
    return (time.process_time() - begun) / steps


def _medians(chunk: int, found: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "chunk": chunk,
        "step": round(statistics.median(alone for alone, _ in found), 4),
        "step_beside_reading": round(statistics.median(beside for _, beside in found), 4),
        "ratio": round(statistics.median(beside / alone for alone, beside in found), 2),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["tiny"], help="models to serve")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 16, 64], help="requests continued together")
    parser.add_argument("--steps", type=int, default=20, help="tokens of each in a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, of which the median is kept")
    parser.add_argument("--out", type=Path, help="the record to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
