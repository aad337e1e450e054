"""`polysketch benchmark attention|hyper|training|decoding|...`: how fast things are on this machine, and could be.

To add one, write a file beside these with a dataclass of flags and `run(flags) -> int`, and add a line to `BENCHMARKS`.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Union

import tyro

from polysketch.cli.benchmark import hyper, serving, speeds, tune

__all__ = ["BENCHMARKS", "BenchmarkFlags", "run"]

BENCHMARKS: dict[str, Callable[[Any], int]] = {
    "attention": speeds.run_attention,
    "hyper": hyper.run,
    "training": speeds.run_training,
    "decoding": speeds.run_decoding,
    "pictures": speeds.run_pictures,
    "serving": serving.run,
    "tune": tune.run,
}
"""Every benchmark; the flags of one are the dataclass that its function takes."""


def _flags_of(function: Callable[[Any], int]) -> type:
    return next(iter(typing.get_type_hints(function).values()))


_ANY_FLAGS: Any = Union[  # noqa: UP007  (made of a table)
    tuple(
        Annotated[_flags_of(function), tyro.conf.subcommand(name, prefix_name=False)]
        for name, function in BENCHMARKS.items()
    )
]


@dataclass(frozen=True)
class BenchmarkFlags:
    """Time attention, training steps or decoding on this machine, against PyTorch's softmax attention.

    Speeds are ratios of alternating calls in one run; a result that disagrees with its definition is not timed. Beside
    every time stands the floor: counted operations and bytes over the rates of this machine. `hyper` is figure 4 of
    HyperAttention's paper. `serving` puts a server under load. `tune` chooses constants of the programs for a GPU.

    Examples:
      polysketch benchmark training --contexts 2048 8192
    """

    benchmark: Annotated[_ANY_FLAGS, tyro.conf.arg(name="")]


def run(flags: BenchmarkFlags) -> int:
    """Run the benchmark whose flags these are, and return the exit status."""
    function = next(one for one in BENCHMARKS.values() if _flags_of(one) is type(flags.benchmark))
    return function(flags.benchmark)
