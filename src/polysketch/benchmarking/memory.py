"""Peak memory of a computation beyond its inputs: the allocator's count on a GPU, a process of its own on a CPU."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import polysketch
from polysketch.benchmarking import calls
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.variants import Sizes, variant
from polysketch.benchmarking.workbench import Workbench


def attention(bench: Workbench, name: str, shape: Shape, sizes: Sizes, *, backward: bool) -> int:
    """Bytes of one call of the variant `name` beyond its inputs, outputs and gradients (on a GPU outputs count)."""
    if bench.device.type == "cuda":
        call = variant(name).prepare(shape, bench.device, bench.dtype, sizes)
        run = calls.forward_backward(call) if backward else calls.forward(call)
        with peak_memory(bench.device) as peak:
            run()
        return peak.bytes or 0
    asked = {"variant": name, "shape": asdict(shape), "sizes": asdict(sizes), "backward": backward}
    return probe("attention", dtype=str(bench.dtype).removeprefix("torch."), **asked)["beyond_bytes"]


def probe(computation: str, **asked: Any) -> dict[str, int]:
    """Measure in a process of its own; see `memory_probe` for the method and for what it can be asked.

    Returns:
        baseline_bytes, beyond_bytes and peak_bytes.

    Raises:
        RuntimeError: the process ended without a figure, for lack of memory for instance.
    """
    given = json.dumps({"computation": computation, "threads": torch.get_num_threads(), **asked})
    command = [sys.executable, "-m", "polysketch.benchmarking.memory_probe", given]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}; was it out of memory?"]
        raise RuntimeError(f"measuring the memory of {asked.get('variant', computation)} failed: {last[0]}")
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    """This process's variables, so that the other one finds this package also where it is not installed."""
    source = str(Path(polysketch.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
