"""Memory beyond inputs, outputs and gradients, and of a training step; each in a process of its own."""

import json
import subprocess
import sys
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.cpu.settings import FULL, Bench, Figure, Outcome

_GIGABYTE = 1e9
_ATTENTION_TARGETS = {
    ("sdpa", False): None,
    ("sdpa", True): None,
    ("features given", False): 0.1,
    ("features given", True): 0.5,
    ("learned sketch", False): 1.0,
    ("learned sketch", True): 1.0,
}
_STEP_TARGET = 8.0


def attention(bench: Bench) -> Outcome:
    """Forward and training memory of attention; see `memory_probe` for the method."""
    outcome = Outcome()
    for (case, backward), target in _ATTENTION_TARGETS.items():
        found = _probe(bench, case, *(["--backward"] if backward else []))
        outcome.measurements.append({"case": case, "backward": backward, **found})
        title = f"memory at {bench.settings.memory_length:,}, {case}, {'training' if backward else 'forward'}"
        figure = _figure(bench, title, found["beyond_bytes"], target, "beyond inputs, outputs and gradients")
        outcome.figures.append(figure)
    return outcome


def training_step(bench: Bench) -> Outcome:
    """Peak memory of the whole process that makes one training step at a long context."""
    name = bench.settings.training_preset
    found = _probe(bench, "training step", "--preset", name)
    title = f"training step of {name} at {bench.settings.memory_length:,}: peak of the process"
    note = f"{found['beyond_bytes'] / _GIGABYTE:.2f} GB of it beyond Python and PyTorch"
    figure = _figure(bench, title, found["peak_bytes"], _STEP_TARGET, note)
    return Outcome([figure], [{"case": f"training step of {name}", **found}])


def _figure(bench: Bench, title: str, size: int, target: float | None, note: str) -> Figure:
    at_most = target if bench.settings.memory_length == FULL.memory_length else None
    return Figure(title, size / _GIGABYTE, "GB", at_most=at_most, note=note)


def _probe(bench: Bench, case: str, *options: str) -> dict[str, Any]:
    settings = bench.settings
    sizes = {"--heads": settings.heads, "--sketch-size": settings.sketch_size, "--local": settings.local}
    command = [sys.executable, "-m", "benchmarks.cpu.memory_probe", case, str(settings.memory_length), *options]
    command += [text for name, size in sizes.items() for text in (name, str(size))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}; was it out of memory?"]
        raise RuntimeError(f"the memory probe of {case} ended: {last[0]}")
    found = json.loads(done.stdout)
    bench.progress(f"memory, {case} {' '.join(options)}: {found['beyond_bytes'] / _GIGABYTE:.3f} GB")
    return {"length": settings.memory_length, "threads": torch.get_num_threads(), **found}
