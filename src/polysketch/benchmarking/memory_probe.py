"""Peak memory of computations, each in a process of its own: `python -m polysketch.benchmarking.memory_probe JSON`.

How: the process allocates and touches the inputs and, as stand-ins, as much as outputs and gradients will take; the
peak of its resident memory so far is the baseline. The stand-ins are freed and the computation runs; what the peak has
risen by is memory beyond inputs, outputs and gradients. A tiny run of the same before loads code and makes threads.
The peak is VmHWM of /proc, or `resource.getrusage` where there is no /proc: Linux hands the latter's maximum on from
the process that started this one.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polysketch.benchmarking import calls
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.models import build_model
from polysketch.benchmarking.ways import Sizes, way
from polysketch.models import TransformerLM

_CPU = torch.device("cpu")
_TINY = 512
_TINY_SHARE = 16
_STATUS = Path("/proc/self/status")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def peak_bytes() -> int:
    """The most resident memory this process has had."""
    if _STATUS.exists():
        line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def attention_bytes(
    make: Callable[..., Call], shape: Shape, *, backward: bool, dtype: torch.dtype = torch.float32
) -> dict[str, int]:
    """Bytes beyond inputs, outputs and gradients of one attention call that `make(shape, device, dtype)` prepares."""
    run = calls.forward_backward if backward else calls.forward
    tiny = min(shape.length, max(_TINY, shape.length // _TINY_SHARE))  # long enough for the same backend
    run(make(Shape(1, tiny, shape.heads, shape.head_dim), _CPU, dtype))()
    call = make(shape, _CPU, dtype)
    output = (shape.batch, shape.heads, shape.length, shape.head_dim)
    stand_ins = [torch.ones(output, dtype=dtype) for _ in range(1 + backward)]
    stand_ins += [torch.ones_like(leaf) for leaf in call.leaves] if backward else []
    baseline = peak_bytes()
    stand_ins.clear()
    run(call)()
    return {"baseline_bytes": baseline, "beyond_bytes": peak_bytes() - baseline, "peak_bytes": peak_bytes()}


def training_bytes(
    make: Callable[[], TransformerLM], batch: int, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, int]:
    """Peak of a process that makes a model and one training step of it at that context, AdamW included."""
    baseline = peak_bytes()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(model.config.vocab_size, (batch, length + 1))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
        loss = model.loss(ids)
    loss.backward()
    optimizer.step()
    return {"baseline_bytes": baseline, "beyond_bytes": peak_bytes() - baseline, "peak_bytes": peak_bytes()}


def _attention(asked: dict[str, Any]) -> dict[str, int]:
    make = way(asked["way"], Sizes(**asked["sizes"])).prepare
    return attention_bytes(make, Shape(**asked["shape"]), backward=asked["backward"], dtype=_DTYPES[asked["dtype"]])


def _training(asked: dict[str, Any]) -> dict[str, int]:
    sizes = Sizes(asked["sketch_size"], asked["local"])
    make = partial(build_model, asked["model"], asked["preset"], sizes)
    return training_bytes(make, asked["batch"], asked["length"], _DTYPES[asked["dtype"]])


_COMPUTATIONS = {"attention": _attention, "training": _training}


def main(text: str) -> None:
    """Measure every case of the JSON list and print a line of JSON for each.

    Several are measured in copies of this process made before anything was computed: they share the time that
    importing PyTorch takes, and no memory that another case has touched.
    """
    cases = json.loads(text)
    measure = _measure if len(cases) == 1 else _measure_in_a_copy
    for asked in cases:
        measure(asked)


def _measure(asked: dict[str, Any]) -> None:
    torch.set_num_threads(asked["threads"])
    print(json.dumps(_COMPUTATIONS[asked["computation"]](asked)), flush=True)


def _measure_in_a_copy(asked: dict[str, Any]) -> None:
    """Measure in a copy of this process, whose peak starts from what it holds now; end with it if it fails."""
    copy = os.fork()
    if copy == 0:
        status = 1
        try:
            _measure(asked)
            status = 0
        except Exception as error:  # noqa: BLE001 - the copy must end here, whatever happens
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    _, status = os.waitpid(copy, 0)
    if os.WIFSIGNALED(status):
        print(f"killed by signal {os.WTERMSIG(status)}; was it out of memory?", file=sys.stderr, flush=True)
    if status:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
