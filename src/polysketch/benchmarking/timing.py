"""Clocks, medians, memory peaks, and what this machine can do at best: shared by all benchmarks."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_FLUSH_BYTES = 256 * 2**20  # several times any L2 cache, so that a repeated call does not find its inputs there


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of `repeats`, with the fastest and the slowest."""

    seconds: float
    fastest: float
    slowest: float
    repeats: int


class Clock:
    """Times calls on one device: CUDA events with the cache flushed before each call, or the host's clock.

    Args:
        device: where the calls run.
        most: repetitions of a measurement, at most.
    """

    def __init__(self, device: torch.device, *, most: int = 20) -> None:
        self.device = device
        self.most = most
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def once(self, function: Callable[[], Any]) -> float:
        """Seconds of one call, its result dropped."""
        if self._flush is None:
            started = time.perf_counter()
            function()
            return time.perf_counter() - started
        self._flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def measure(self, function: Callable[[], Any], *, limit_seconds: float = 0.4) -> Timing:
        """The median over as many calls as fit in about `limit_seconds`, at least 3, if not limited to fewer.

        Two calls warm up. A call that takes longer than the limit warms up and is timed once each, and that is all.
        """
        seconds = self.once(function)
        if seconds > limit_seconds:
            return summary([self.once(function)])
        seconds = min(seconds, self.once(function))
        repeats = min(self.most, max(3, int(limit_seconds / max(seconds, 1e-6))))
        return summary([self.once(function) for _ in range(repeats)])

    def alternate(
        self,
        functions: Mapping[str, Callable[[], Any]],
        *,
        repeats: int,
        warmup: int = 1,
        progress: Callable[[str], None] = lambda _: None,
    ) -> dict[str, list[float]]:
        """Seconds of every call of A B A B ..., so that a machine that slows down slows all of them."""
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for turn in range(warmup + repeats):
            for name, function in functions.items():
                spent = self.once(function)
                progress(f"{name} {'warm-up' if turn < warmup else turn - warmup + 1}: {spent:.3g} s")
                if turn >= warmup:
                    seconds[name].append(spent)
        return seconds


def summary(seconds: list[float]) -> Timing:
    """Median and spread of repeated measurements."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median of the ratios of neighbours in an alternating run."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def peak_memory(device: torch.device, function: Callable[[], Any]) -> int | None:
    """Device memory that a call allocates at most, beyond what was allocated before; on a CPU None, after the call."""
    if device.type != "cuda":
        function()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Float32 products at "highest" (float32) or "high" (TF32 on a GPU) inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Rates:
    """What this machine does at best, measured in the same run: operations/s of a product, bytes/s of a copy.

    Raises:
        ValueError: a rate that is not above zero.
    """

    operations: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, rate in (("operations", self.operations), ("bandwidth", self.bandwidth)):
            if not rate > 0:
                raise ValueError(f"{name}: expected a rate above zero, found {rate}")


_TRIED = 256  # rows of the first product
_LONGEST_SECONDS = 2.0


def matrix_rate(clock: Clock, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a square matrix product of random numbers.

    Where a machine has no instructions for a dtype, a product can take a thousand times as long: a small one tells so
    first, and then a smaller one than was asked for is measured.
    """
    if size > _TRIED:
        tried = matrix_rate(clock, dtype, _TRIED)
        while size > _TRIED and 2 * size**3 / tried > _LONGEST_SECONDS:
            size //= 2
    left = torch.randn(size, size, device=clock.device).to(dtype)
    right = torch.randn(size, size, device=clock.device).to(dtype)
    out = torch.empty_like(left)
    return 2 * size**3 / clock.measure(lambda: torch.mm(left, right, out=out)).fastest


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Bytes read plus bytes written per second, copying `size` bytes."""
    source = torch.randint(127, (size,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.measure(lambda: target.copy_(source)).fastest
