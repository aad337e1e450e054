"""Tuned constants of the programs: data, one file for each program, found by device and by what a call looks like.

A file holds a list of entries for each generation of devices; the first whose conditions hold is taken, and the last
has none. A condition is the name of a property of the call and its value, or in brackets the largest value it may have.
Lengths and batch sizes are no properties: a program is compiled once for a model, not for every prompt. What tuning
found on this machine comes before what is shipped (`tuned`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from polysketch.ops.triton.tuned import tuned_entries

FOLDER = Path(__file__).parent / "configurations"
"""Of what is shipped."""
GENERATIONS = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100"}
"""Least compute capability of each; sm_80 stays below the 99 KB of shared memory that all of its kin have."""
ELSEWHERE = (9, 0)
"""Taken for the compute capability where there is no device, under the interpreter."""
_SMALL = {(12, 0), (12, 1)}  # newer, and with 99 KB of shared memory all the same

# Plain globals: gradients are computed by another thread, which would not see context variables.
_capability: tuple[int, int] | None = None
_forced: dict[str, Mapping[str, int]] = {}
_observers: list[Callable[[str, dict[str, int | str], dict[str, int]], None]] = []


def configuration(program: str, device: torch.device, **call: int | str) -> dict[str, int]:
    """The constants with which `program` is launched.

    Args:
        program: its name, that of the file.
        device: where it runs.
        call: properties of the call: widths, dtype, options. Never a length.

    Raises:
        FileNotFoundError: no such program.
        ValueError: its file does not fit the call.
    """
    use = dict(_forced[program] if program in _forced else _shipped_or_tuned(program, device, call))
    for observe in _observers:
        observe(program, call, use)
    return use


def _shipped_or_tuned(program: str, device: torch.device, call: Mapping[str, int | str]) -> Mapping[str, int]:
    here = device if _capability is None and device.type != "meta" else None
    for entry in _entries(program, generation(device), here):
        if _fits(entry["where"], call):
            return entry["use"]
    raise ValueError(f"no configuration of {program} fits a call with {call}; the last entry must have no condition")


def _fits(conditions: Mapping[str, int | str | list[int]], call: Mapping[str, int | str]) -> bool:
    """Whether a call meets every condition; a list [n] stands for at most n."""
    unknown = sorted(conditions.keys() - call.keys())
    if unknown:
        raise ValueError(f"a configuration asks for {unknown}; calls of its program have {sorted(call)}")
    return all(
        call[name] <= wanted[0] if isinstance(wanted, list) else call[name] == wanted  # type: ignore[operator]
        for name, wanted in conditions.items()
    )


def generation(device: torch.device) -> str:
    """Name of the generation of a device; without one, as under the interpreter, that of the H100."""
    capability = _capability
    if capability is None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ELSEWHERE
    if capability in _SMALL:
        return "sm_80"
    return next(name for least, name in reversed(GENERATIONS.items()) if capability >= least)


@cache
def _entries(program: str, name: str, device: torch.device | None) -> list[dict]:
    """What tuning found on a device, then what is shipped; without a device, what is shipped alone."""
    shipped = json.loads((FOLDER / f"{program}.json").read_text())
    return [*([] if device is None else tuned_entries(program, name, device)), *shipped[name]]


def forget_tuned() -> None:
    """Look into the files of tuned entries again: they changed."""
    _entries.cache_clear()


@contextmanager
def forced(**programs: Mapping[str, int]) -> Iterator[None]:
    """Within this block these programs are launched with these constants."""
    global _forced
    before, _forced = _forced, {**_forced, **programs}
    try:
        yield
    finally:
        _forced = before


@contextmanager
def as_if_on(capability: tuple[int, int]) -> Iterator[None]:
    """Within this block configurations are those of a device of this compute capability."""
    global _capability
    before, _capability = _capability, capability
    try:
        yield
    finally:
        _capability = before


@contextmanager
def observing(observe: Callable[[str, dict[str, int | str], dict[str, int]], None]) -> Iterator[None]:
    """Within this block `observe` is told of every question to `configuration`: program, call and answer."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)
