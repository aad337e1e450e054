"""Memory beyond inputs, outputs and gradients, and of a training step; each in a process of its own."""

from benchmarks.cpu.settings import FULL, Bench, Figure, Outcome
from polysketch.benchmarking import TrainingSettings, memory
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.training_steps import process_peak
from polysketch.benchmarking.ways import Sizes, way

_GIGABYTE = 1e9
_ATTENTION_TARGETS = {
    ("sdpa", False): None,
    ("sdpa", True): None,
    ("given", False): 0.1,
    ("given", True): 0.5,
    ("learned", False): 1.0,
    ("learned", True): 1.0,
}
_STEP_TARGET = 8.0


def attention(bench: Bench) -> Outcome:
    """Forward and training memory of attention; see `polysketch.benchmarking.memory_probe` for the method."""
    outcome, settings = Outcome(), bench.settings
    shape, sizes = Shape(1, settings.memory_length, settings.heads), Sizes(settings.sketch_size, settings.local)
    for (name, backward), target in _ATTENTION_TARGETS.items():
        found = memory.attention(bench, name, shape, sizes, backward=backward)
        case = {"case": way(name, sizes).title, "backward": backward, "length": shape.length}
        outcome.measurements.append({**case, "beyond_bytes": found})
        title = f"memory at {shape.length:,}, {case['case']}, {'training' if backward else 'forward'}"
        bench.progress(f"{title}: {found / _GIGABYTE:.3f} GB")
        outcome.figures.append(_figure(bench, title, found, target, "beyond inputs, outputs and gradients"))
    return outcome


def training_step(bench: Bench) -> Outcome:
    """Peak memory of the whole process that makes one training step at a long context."""
    settings, length = bench.settings, bench.settings.memory_length
    asked = TrainingSettings(
        preset=settings.training_preset, sketch_size=settings.sketch_size, local=settings.local, contexts=(length,)
    )
    found = process_peak(asked, "learned", length, bench.dtype)
    title = f"training step of {asked.preset} at {length:,}: peak of the process"
    note = f"{found['beyond_bytes'] / _GIGABYTE:.2f} GB of it beyond Python and PyTorch"
    figure = _figure(bench, title, found["peak_bytes"], _STEP_TARGET, note)
    return Outcome([figure], [{"case": f"training step of {asked.preset}", "length": length, **found}])


def _figure(bench: Bench, title: str, size: int, target: float | None, note: str) -> Figure:
    at_most = target if bench.settings.memory_length == FULL.memory_length else None
    return Figure(title, size / _GIGABYTE, "GB", at_most=at_most, note=note)
