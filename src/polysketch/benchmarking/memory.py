"""Peak memory of a computation beyond its inputs: the allocator's count on a GPU, a process of its own on a CPU.

How on a CPU: the process allocates and touches the inputs and, as stand-ins, as much as outputs and gradients will
take; the peak of its resident memory so far is the baseline. The stand-ins are freed and the computation runs; what the
peak has risen by is memory beyond inputs, outputs and gradients. A tiny run of the same before loads code and makes
threads. The peak is VmHWM of /proc, or `resource.getrusage` where there is no /proc: Linux hands the latter's maximum
on from the process that started this one. The process is `python -m polysketch.benchmarking.memory JSON`.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import polysketch
from polysketch.benchmarking import calls
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.models import build_model, training_step
from polysketch.benchmarking.settings import TrainingSettings
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.way_names import Sizes
from polysketch.benchmarking.ways import way
from polysketch.benchmarking.workbench import Workbench

_CPU = torch.device("cpu")
_TINY = 512
_TINY_SHARE = 16
_STATUS = Path("/proc/self/status")


def attention(bench: Workbench, name: str, shapes: Sequence[Shape], sizes: Sizes, *, backward: bool) -> list[int]:
    """Bytes of one call of the way `name` beyond its inputs, outputs and gradients (on a GPU outputs count), by shape.

    Raises:
        RuntimeError: a process ended without a figure, for lack of memory for instance.
    """
    if bench.device.type == "cuda":
        run = calls.forward_backward if backward else calls.forward
        prepared = (way(name, sizes).prepare(shape, bench.device, bench.dtype) for shape in shapes)
        return [peak_memory(bench.device, run(call)) or 0 for call in prepared]
    same = {"name": name, "sizes": asdict(sizes), "backward": backward}
    return _measured([{**same, "shape": asdict(shape)} for shape in shapes], bench.dtype)


def training(settings: TrainingSettings, name: str, context: int, dtype: torch.dtype) -> int:
    """Peak memory of a process that makes a model and one training step of it on a CPU, AdamW included.

    Raises:
        RuntimeError: as for `attention`.
    """
    return _measured([{"name": name, "settings": asdict(settings), "length": context}], dtype)[0]


def _measured(cases: list[dict[str, Any]], dtype: torch.dtype) -> list[int]:
    """The bytes of each case: on Linux from copies of one process, elsewhere each from a process started for it."""
    same = {"dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    asked = [{**same, **case} for case in cases]
    runs = [asked] if sys.platform == "linux" else [[case] for case in asked]
    return [found for run in runs if run for found in _run_apart(run)]


def _run_apart(cases: list[dict[str, Any]]) -> list[int]:
    source = str(Path(polysketch.__file__).parents[1])  # also where the package is not installed
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "polysketch.benchmarking.memory", json.dumps(cases)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}; was it out of memory?"]
        raise RuntimeError(f"measuring the memory of {cases[0]['name']} failed: {last[0]}")
    return [int(line) for line in done.stdout.splitlines()]


def attention_bytes(
    make: Callable[..., Call], shape: Shape, *, backward: bool, dtype: torch.dtype = torch.float32
) -> int:
    """What one attention call that `make(shape, device, dtype)` prepares takes in this process; see the module."""
    run = calls.forward_backward if backward else calls.forward
    tiny = min(shape.length, max(_TINY, shape.length // _TINY_SHARE))  # long enough for the same backend
    run(make(Shape(1, tiny, shape.heads, shape.head_dim, shape.causal), _CPU, dtype))()
    call = make(shape, _CPU, dtype)
    output = (shape.batch, shape.heads, shape.length, shape.head_dim)
    stand_ins = [torch.ones(output, dtype=dtype) for _ in range(1 + backward)]
    stand_ins += [torch.ones_like(leaf) for leaf in call.leaves] if backward else []
    baseline = _peak_bytes()
    stand_ins.clear()
    run(call)()
    return _peak_bytes() - baseline


def _training_bytes(name: str, settings: TrainingSettings, length: int, dtype: torch.dtype) -> int:
    model = build_model(name, settings.preset, settings.sizes, **settings.changes)
    ids = torch.randint(model.config.vocab_size, (settings.batch, length + 1))
    training_step(model, ids, dtype)()
    return _peak_bytes()


def _peak_bytes() -> int:
    """The most resident memory this process has had."""
    if _STATUS.exists():
        line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(text: str) -> None:
    """Measure every case of the JSON list and print a line with its bytes.

    Several are measured in copies of this process made before anything was computed: they share the time that
    importing PyTorch takes, and no memory that another case has touched. It ends with the first copy that fails.
    """
    cases = json.loads(text)
    if len(cases) == 1:
        return _measure(cases[0])
    for asked in cases:
        copy = multiprocessing.get_context("fork").Process(target=_measure, args=(asked,))
        copy.start()
        copy.join()
        if copy.exitcode and copy.exitcode < 0:
            print(f"killed by signal {-copy.exitcode}; was it out of memory?", file=sys.stderr, flush=True)
        if copy.exitcode:
            sys.exit(1)


def _measure(asked: dict[str, Any]) -> None:
    torch.set_num_threads(asked["threads"])
    dtype, name = getattr(torch, asked["dtype"]), asked["name"]
    if "settings" in asked:
        found = _training_bytes(name, TrainingSettings(**asked["settings"]), asked["length"], dtype)
    else:
        make = way(name, Sizes(**asked["sizes"])).prepare
        found = attention_bytes(make, Shape(**asked["shape"]), backward=asked["backward"], dtype=dtype)
    print(found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
