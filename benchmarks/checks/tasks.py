"""Everything that is checked on a device as a list of tasks, each known by its place in the list."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.checks import all_checks
from benchmarks.checks.base import Check, run_check
from benchmarks.checks.ratios import Ratio, ratios, run_ratio

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One thing to check.

    Attributes:
        kind: of its records.
        name: of what is checked.
        run: device -> records, each with `name` and `passed`; raises nothing.
        only_on: type of the devices that it is for, on others it has no records; None for all.
    """

    kind: str
    name: str
    run: Callable[[torch.device], list[Record]]
    only_on: str | None = None


def all_tasks(*, quick: bool) -> list[Task]:
    """The errors beside those of plain formulas first, then every check with a tolerance."""
    return [*map(_of_ratio, ratios(quick)), *map(_of_check, all_checks(quick=quick))]


def _of_ratio(one: Ratio) -> Task:
    return Task("ratio", f"{one.name}, {one.dtype}", partial(run_ratio, one))


def _of_check(one: Check) -> Task:
    def run(device: torch.device) -> list[Record]:
        return [run_check(one, device)] if one.only_on in (None, device.type) else []

    return Task("check", one.name, run, one.only_on)
