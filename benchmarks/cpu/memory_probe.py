"""Peak memory of one computation, in a process of its own: `python -m benchmarks.cpu.memory_probe CASE LENGTH ...`.

How: the process allocates and touches the inputs and, as stand-ins, as much as outputs and gradients will take; the
peak of its resident memory so far is the baseline. The stand-ins are freed and the computation runs; what the peak has
risen by is memory beyond inputs, outputs and gradients. A tiny run of the same before loads code and makes threads.
The peak is VmHWM of /proc, or `resource.getrusage` where there is no /proc: Linux hands the latter's maximum on from
the process that started this one.
"""

import argparse
import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import calls
from benchmarks.calls import Call
from benchmarks.floors import Shape
from polysketch.models import TransformerLM, preset

_CPU = torch.device("cpu")
_TINY = 64
_STATUS = Path("/proc/self/status")
_DTYPE = torch.float32


def peak_bytes() -> int:
    """The most resident memory this process has had."""
    if _STATUS.exists():
        line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def attention_bytes(make: Callable[..., Call], shape: Shape, *, backward: bool) -> dict[str, int]:
    """Bytes beyond inputs, outputs and gradients of one attention call."""
    run = calls.forward_backward if backward else calls.forward
    run(make(Shape(1, _TINY, shape.heads), _CPU, _DTYPE))()
    call = make(shape, _CPU, _DTYPE)
    stand_ins = [torch.ones(shape.batch, shape.heads, shape.length, shape.head_dim) for _ in range(1 + backward)]
    stand_ins += [torch.ones_like(leaf) for leaf in call.leaves] if backward else []
    baseline = peak_bytes()
    stand_ins.clear()
    run(call)()
    return {"baseline_bytes": baseline, "beyond_bytes": peak_bytes() - baseline, "peak_bytes": peak_bytes()}


def training_bytes(preset_name: str, length: int, options: dict[str, Any]) -> dict[str, int]:
    """Peak of a process that makes one training step of a model at that context, AdamW included."""
    baseline = peak_bytes()
    model = TransformerLM(preset(preset_name, attention_options=options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.loss(torch.randint(model.config.vocab_size, (1, length + 1))).backward()
    optimizer.step()
    return {"baseline_bytes": baseline, "beyond_bytes": peak_bytes() - baseline, "peak_bytes": peak_bytes()}


def main() -> None:
    """Measure one case and print it as JSON."""
    parser = argparse.ArgumentParser("memory_probe")
    parser.add_argument("case", choices=("sdpa", "features given", "learned sketch", "training step"))
    parser.add_argument("length", type=int)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--sketch-size", type=int, default=32)
    parser.add_argument("--local", type=int, default=256)
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--backward", action="store_true")
    print(json.dumps(_measure(parser.parse_args())))


def _measure(arguments: argparse.Namespace) -> dict[str, int]:
    sketch = {"sketch_size": arguments.sketch_size}
    if arguments.case == "training step":
        return training_bytes(arguments.preset, arguments.length, {**sketch, "local_chunk": arguments.local})
    sizes = {**sketch, "local": arguments.local}
    makers: dict[str, Callable[..., Call]] = {
        "sdpa": calls.sdpa,
        "features given": partial(calls.linear, **sizes),
        "learned sketch": partial(calls.polysketch, **sizes),
    }
    shape = Shape(1, arguments.length, arguments.heads)
    return attention_bytes(makers[arguments.case], shape, backward=arguments.backward)


if __name__ == "__main__":
    main()
