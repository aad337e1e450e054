"""`polysketch benchmark tune`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    import torch

__all__ = ["TuneFlags", "run"]

Op = Literal[
    "linear",
    "sketch",
    "low_rank",
    "head_sketch",
    "convolution",
    "rotated_heads",
    "gated_gelu",
    "cross_entropy",
    "polynomial",
    "hyper",
    "window",
    "delta",
    "decoding",
]


@dataclass(frozen=True, kw_only=True)
class TuneFlags:
    """Choose block sizes, warps and stages of the Triton programs for this GPU, by timing them.

    Each program of each call (sketch sizes 16 to 128, heads of 64 and 128, ...) is tried with constants near those in
    use; what is at least 3 % faster and gives the same result is kept for calls of that kind, and found by every later
    process of this user, as long as the GPU, Triton and the programs are the same. To undo it, delete the files that
    are named at the end.
    """

    programs: tuple[str, ...] = ()
    """only these programs, by the names of their files of configurations, linear_outputs for one; default: all"""
    ops: Annotated[tuple[Op, ...], tyro.conf.arg(metavar="OP...")] = ()
    """only the programs of these: linear, sketch, low_rank, head_sketch, convolution, rotated_heads, gated_gelu,
    cross_entropy, polynomial, hyper, window, delta, decoding; default: all"""
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16",)
    """of the inputs"""
    match: str = ""
    """only calls whose names contain this: "r=32, h=64" for one"""
    device: str = "cuda"
    """the GPU: cuda, cuda:1, ..."""
    out: Path | None = None
    """folder for the files, one a program in the form of the shipped ones; default: the user's cache folder"""
    budget_seconds: float = 1800.0
    """what does not fit is left out, the least common calls first"""

    def __post_init__(self) -> None:
        if self.budget_seconds <= 0:
            raise ValueError(f"expected --budget-seconds above 0, found {self.budget_seconds:g}")


def run(flags: TuneFlags) -> int:
    """Tune as the flags say, and return the exit status.

    Raises:
        RuntimeError: no GPU that the programs run on.
        ValueError: nothing to tune by that name.
    """
    from polysketch.benchmarking.program_calls import most_common_first, program_calls
    from polysketch.benchmarking.timing import Clock
    from polysketch.benchmarking.tuning import Tuning, tune
    from polysketch.ops.triton.configurations import generation
    from polysketch.ops.triton.tuned import tuned_file

    device = _device(flags.device)
    _check_names(flags.programs)
    calls = [call for call in most_common_first(program_calls(flags.ops, flags.dtypes)) if flags.match in call.name]
    if not calls:
        raise ValueError(f"expected calls to tune for, found none whose name contains {flags.match!r}")
    out = flags.out
    how = Tuning(
        clock=Clock(device),
        generation=generation(device),
        file_of=tuned_file if out is None else lambda program: out / f"{program}.json",
        programs=flags.programs,
        deadline=time.monotonic() + flags.budget_seconds,
        say=lambda text: print(text, flush=True),
    )
    found = tune(calls, how)
    print(f"{sum(map(len, found.values()))} configurations faster than those in use")
    for program in found:
        print(f"  {how.file_of(program)}")
    return 0


def _device(name: str) -> "torch.device":
    import torch

    from polysketch.ops.triton import why_not

    device = torch.device(name)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError(f"tuning times programs on a GPU: expected --device cuda and a GPU, found {name!r} and none")
    reason = why_not(torch.empty(0, device=device))
    if reason is not None:
        raise RuntimeError(reason)
    return device


def _check_names(programs: tuple[str, ...]) -> None:
    from polysketch.benchmarking.tuning import program_names

    unknown = sorted(set(programs) - set(program_names()))
    if unknown:
        raise ValueError(f"expected --programs among {', '.join(program_names())}; found {', '.join(unknown)}")
