"""What the programs are meant to reach on an H200, beside what was measured."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Figure
from benchmarks.gpu.kernels import SDPA
from benchmarks.journal import Journal

_BOTH = "forward+backward"
_GIVEN = "features r=32"


def figures(journal: Journal) -> list[Figure]:
    """Every target whose measurements are there."""
    return [*_attention(journal), *_training(journal), *_decoding(journal)]


def unmeasured(journal: Journal) -> list[str]:
    """Names of targets that this run says nothing about."""
    found = {figure.name for figure in figures(journal)}
    return [name for name in NAMES if name not in found]


NAMES = (
    "rate, r=32, forward+backward at 32k",
    "forward+backward at 32k over fastest SDPA",
    "forward+backward at 128k over fastest SDPA",
    "break-even with fastest SDPA, forward+backward",
    "training step at 32k over softmax, random r=32",
    "training step at 32k over softmax, learned r=32",
    "decoding at 32k over a KV cache, largest batches, random r=32",
)


def _attention(journal: Journal) -> Iterator[Figure]:
    """Of batches of a constant number of tokens."""
    times = {(one["series"], one["length"]): one for one in journal.of("time") if _counts(one)}
    if (_GIVEN, 2**15) in times:
        yield Figure(NAMES[0], times[_GIVEN, 2**15]["tflops"], "TFLOP/s", at_least=200)
    speeds = _speeds(times)
    for name, length, wanted in ((NAMES[1], 2**15, 8), (NAMES[2], 2**17, 30)):
        if length in speeds:
            yield Figure(name, speeds[length], "x", at_least=wanted)
    even = break_even(speeds)
    if even is not None:
        yield Figure(NAMES[3], even, "tokens", at_most=3_000)


def _counts(one: dict[str, Any]) -> bool:
    """The longest length has a batch of one, which is its constant number of tokens."""
    return one["direction"] == _BOTH and (one["batch"] > 1 or one["length"] == 2**17)


def _speeds(times: dict[tuple[str, int], dict[str, Any]]) -> dict[int, float]:
    """Length -> times as fast as the fastest fused kernel."""
    speeds: dict[int, float] = {}
    for length in sorted({length for _, length in times}):
        fused = [times[name, length]["seconds"] for name in SDPA if (name, length) in times]
        if fused and (_GIVEN, length) in times:
            speeds[length] = min(fused) / times[_GIVEN, length]["seconds"]
    return speeds


def break_even(speeds: dict[int, float]) -> float | None:
    """The length from which on it is faster, between two that were measured; None where it is not, or not yet."""
    lengths = sorted(speeds)
    if not lengths or speeds[lengths[-1]] < 1:
        return None
    for shorter, longer in reversed(list(itertools.pairwise(lengths))):
        if speeds[shorter] < 1:
            share = math.log(1 / speeds[shorter]) / math.log(speeds[longer] / speeds[shorter])
            return shorter * (longer / shorter) ** share
    return float(lengths[0])


def _training(journal: Journal) -> Iterator[Figure]:
    seconds = {one["model"]: one["seconds"] for one in journal.of("train") if one["length"] == 2**15}
    for name, model, wanted in ((NAMES[4], "random r=32", 3.0), (NAMES[5], "learned r=32", 2.3)):
        if {"softmax", model} <= seconds.keys():
            yield Figure(name, seconds["softmax"] / seconds[model], "x", at_least=wanted)


def _decoding(journal: Journal) -> Iterator[Figure]:
    here = [one for one in journal.of("decode") if one["position"] == 2**15 and one["largest"]]
    rates = {one["model"]: one["tokens_per_second"] for one in here}
    if {"softmax", "random r=32"} <= rates.keys():
        yield Figure(NAMES[6], rates["random r=32"] / rates["softmax"], "x", at_least=10)
