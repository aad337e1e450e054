"""Figures for a monitor, in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

__all__ = ["Histogram", "Metrics", "exposition"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Series = tuple[str, str, str, list[tuple[str, float]]]
"""Name, kind, help, and (what stands behind the name, value) of each line."""


class Histogram:
    """How many seconds things took, in buckets."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._buckets = [0] * (len(_SECONDS) + 1)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.sum += seconds
        self._buckets[bisect_left(_SECONDS, seconds)] += 1

    @property
    def mean(self) -> float:
        """Seconds, 0 while nothing was counted."""
        return self.sum / self.count if self.count else 0.0

    def lines(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each bucket has those of the smaller ones too."""
        lines, total = [], 0
        for bound, count in zip([*map(str, _SECONDS), "+Inf"], self._buckets, strict=True):
            total += count
            lines.append((f'_bucket{{le="{bound}"}}', float(total)))
        return [*lines, ("_sum", self.sum), ("_count", float(self.count))]


class Metrics:
    """What was counted since the server began."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """Requests by why they ended: stop, length, error, cancelled."""
        self.refused = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.new_tokens = 0
        self.first_token = Histogram()
        self.request = Histogram()

    def series(self) -> list[Series]:
        """All of it."""
        ended = [(f'{{reason="{reason}"}}', float(count)) for reason, count in sorted(self.finished.items())]
        counters = (
            ("requests_refused_total", "requests that were told to come again", self.refused),
            ("prompt_tokens_total", "tokens of prompts, those that a snapshot had included", self.prompt_tokens),
            (
                "reused_prompt_tokens_total",
                "prompt tokens that a snapshot had",
                self.reused_tokens,
            ),
            ("new_tokens_total", "tokens made", self.new_tokens),
        )
        return [
            ("requests_finished_total", "counter", "requests by why they ended", ended),
            *((name, "counter", text, [("", float(value))]) for name, text, value in counters),
            ("first_token_seconds", "histogram", "from a request to its first token", self.first_token.lines()),
            ("request_seconds", "histogram", "from a request to its end", self.request.lines()),
        ]


def exposition(series: Iterable[Series]) -> str:
    """The text that a monitor reads; every name begins with `polysketch_`."""
    lines = []
    for name, kind, text, values in series:
        lines += [f"# HELP polysketch_{name} {text}", f"# TYPE polysketch_{name} {kind}"]
        lines += [f"polysketch_{name}{behind} {value:.12g}" for behind, value in values]
    return "\n".join(lines) + "\n"
