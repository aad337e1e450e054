"""What the programs are meant to reach on an H200, beside what was measured."""

from typing import Any

from benchmarks.break_even import break_even
from benchmarks.figures import NOT_FOUND_OUT, Figure, Target
from benchmarks.journal import Journal
from polysketch.benchmarking.way_names import FUSED

_GIVEN = "features r=32"
_STEP = (
    "the rest of the model: of softmax's 239 ms on an H200 cuDNN's attention takes 157, so what is not attention would "
    "have to become faster too"
)

RATE = Target(at_least=200, why=NOT_FOUND_OUT)
SPEEDS = {2**15: Target(at_least=8, why=NOT_FOUND_OUT), 2**17: Target(at_least=30, why=NOT_FOUND_OUT)}
BREAK_EVEN = Target(at_most=3_000, why=NOT_FOUND_OUT)
STEPS = {"random r=32": Target(at_least=3.0, why=_STEP), "learned r=32": Target(at_least=2.3, why=_STEP)}
DECODING = Target(at_least=10, why=NOT_FOUND_OUT)


def figures(journal: Journal) -> dict[str, Figure | None]:
    """Every target by name, attention on batches of a constant number of tokens; None where nothing was measured."""
    times = {(one["series"], one["length"]): one for one in journal.of("time") if _counts(one)}
    steps = {one["model"]: one["seconds"] for one in journal.of("train") if one["length"] == 2**15}
    largest = [one for one in journal.of("decode") if one["position"] == 2**15 and one["largest"]]
    tokens = {one["model"]: one["seconds"] / one["rows"] for one in largest}
    rate, speeds = times.get((_GIVEN, 2**15), {}).get("tflops"), _speeds(times)
    decoding, even = _over_softmax(tokens, "random r=32"), break_even(speeds)
    found: dict[str, tuple[float | None, str, Target]] = {
        "rate, r=32, forward+backward at 32k": (rate, "TFLOP/s", RATE),
        **{
            f"forward+backward at {length // 2**10}k over fastest SDPA": (speeds.get(length), "x", target)
            for length, target in SPEEDS.items()
        },
        "break-even with fastest SDPA, forward+backward": (even, "tokens", BREAK_EVEN),
        **{
            f"training step at 32k over softmax, {model}": (_over_softmax(steps, model), "x", target)
            for model, target in STEPS.items()
        },
        "decoding at 32k over a KV cache, largest batches, random r=32": (decoding, "x", DECODING),
    }
    return {
        name: None if value is None else Figure(name, value, unit, target)
        for name, (value, unit, target) in found.items()
    }


def _counts(one: dict[str, Any]) -> bool:
    """The longest length has a batch of one, which is its constant number of tokens."""
    return one["direction"] == "forward+backward" and (one["batch"] > 1 or one["length"] == 2**17)


def _over_softmax(seconds: dict[str, float], model: str) -> float | None:
    return seconds["softmax"] / seconds[model] if {"softmax", model} <= seconds.keys() else None


def _speeds(times: dict[tuple[str, int], dict[str, Any]]) -> dict[int, float]:
    """Length -> times as fast as the fastest fused kernel."""
    speeds: dict[int, float] = {}
    for length in sorted({length for _, length in times}):
        fused = [times[name, length]["seconds"] for name in FUSED if (name, length) in times]
        if fused and (_GIVEN, length) in times:
            speeds[length] = min(fused) / times[_GIVEN, length]["seconds"]
    return speeds
