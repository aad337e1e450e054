"""Peak memory of a computation beyond its inputs: the allocator's count on a GPU, a process of its own on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import polysketch
from polysketch.benchmarking import calls
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.ways import Sizes, way
from polysketch.benchmarking.workbench import Workbench


def attention(bench: Workbench, name: str, shape: Shape, sizes: Sizes, *, backward: bool) -> int:
    """Bytes of one call of the way `name` beyond its inputs, outputs and gradients (on a GPU outputs count)."""
    return attention_by_shape(bench, name, [shape], sizes, backward=backward)[0]


def attention_by_shape(
    bench: Workbench, name: str, shapes: Sequence[Shape], sizes: Sizes, *, backward: bool
) -> list[int]:
    """As `attention`, for every shape."""
    if bench.device.type == "cuda":
        return [_on_gpu(bench, name, shape, sizes, backward=backward) for shape in shapes]
    same = {"way": name, "sizes": asdict(sizes), "backward": backward}
    dtype = str(bench.dtype).removeprefix("torch.")
    cases = [_asked("attention", dtype=dtype, shape=asdict(shape), **same) for shape in shapes]
    return [found["beyond_bytes"] for found in _probe_all(cases)]


def _on_gpu(bench: Workbench, name: str, shape: Shape, sizes: Sizes, *, backward: bool) -> int:
    call = way(name, sizes).prepare(shape, bench.device, bench.dtype)
    run = calls.forward_backward(call) if backward else calls.forward(call)
    with peak_memory(bench.device) as peak:
        run()
    return peak.bytes or 0


def probe(computation: str, **asked: Any) -> dict[str, int]:
    """Measure in a process of its own; see `memory_probe` for the method and for what it can be asked.

    Returns:
        baseline_bytes, beyond_bytes and peak_bytes.

    Raises:
        RuntimeError: the process ended without a figure, for lack of memory for instance.
    """
    return _probe_all([_asked(computation, **asked)])[0]


def _asked(computation: str, **asked: Any) -> dict[str, Any]:
    return {"computation": computation, "threads": torch.get_num_threads(), **asked}


def _probe_all(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The figures of each case: on Linux from copies of one process, elsewhere each from a process started for it."""
    runs = [cases] if sys.platform == "linux" else [[case] for case in cases]
    return [found for run in runs if run for found in _run_probe(run)]


def _run_probe(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "polysketch.benchmarking.memory_probe", json.dumps(cases)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}; was it out of memory?"]
        what = cases[0].get("way", cases[0]["computation"])
        raise RuntimeError(f"measuring the memory of {what} failed: {last[0]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _environment() -> dict[str, str]:
    """This process's variables, so that the other one finds this package also where it is not installed."""
    source = str(Path(polysketch.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
