"""`polysketch benchmark hyper`: what is timed, and the columns of its table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polysketch.benchmarking import HyperSettings
from polysketch.benchmarking.tables import Row, megabytes
from polysketch.cli.benchmark.common import CommonFlags, run_benchmark, time_columns

if TYPE_CHECKING:
    from polysketch.benchmarking import Workbench

__all__ = ["HyperFlags", "run"]

_NOTE = (
    "speedup: over SDPA, on a GPU the fastest of its programs. error: |found - exact| / |exact| of the output, softmax"
    " attention being exact. Queries and keys are random, so that attention is spread over all tokens: a mean of that"
    " many values is small, and one of few samples is not. Up to min length tokens hyper is exact, too."
    " paper: how many times as fast as FlashAttention at 131,072 tokens, at most (arXiv:2310.05869, figure 4: 12 heads"
    " of 64 on a GPU)"
)


@dataclass(frozen=True, kw_only=True)
class HyperFlags(CommonFlags, HyperSettings):
    """Time HyperAttention at several lengths, causal and not, against PyTorch's scaled_dot_product_attention: figure 4
    of its paper (arXiv:2310.05869). On a GPU each of the fused programs of the latter that can is timed, and the
    fastest counts.

    The result, with gradients where they are timed, is first compared with softmax attention where every key is met,
    and elsewhere with plain PyTorch's by the same draws; one that disagrees is not timed, and the exit status is 1. At
    131,072 tokens a call of exact attention takes minutes on a few cores: the second example is a minute on two.

    Examples:
      polysketch benchmark hyper --backward --plot hyper.png --out hyper.json
      polysketch benchmark hyper --lengths 4096 8192 16384 --heads 2 --repeats 2
    """


def run(flags: HyperFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""

    def measure(bench: "Workbench", settings: HyperSettings) -> list[dict[str, Any]]:
        """With a line of progress."""
        from polysketch.benchmarking import time_hyper

        return time_hyper(bench, settings, show_progress=True)

    return run_benchmark("hyper", flags, HyperSettings, _row, measure, note=_NOTE)


def _row(one: dict[str, Any]) -> Row:
    times = time_columns(one, "SDPA")
    del times["tokens/s"]  # there is room for what is not in other tables
    return {
        "length": f"{one['length']:,}",
        "causal": "yes" if one["causal"] else "no",
        "backward": "yes" if one["backward"] else "",
        "": one["series"],
        **times,
        "error": "" if one["error"] is None else f"{one['error']:.2g}",
        "paper": "" if one["paper_ratio"] is None else f"{one['paper_ratio']:g}",
        "peak MB": megabytes(one["peak_bytes"]),
    }
