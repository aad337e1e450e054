"""Correctness on a device against float64 on the CPU: tables of checks, one file per kind of object."""

from benchmarks.checks import captured, exact, linear, mechanisms, models
from benchmarks.checks.base import Check, run_check


def all_checks(*, quick: bool) -> list[Check]:
    """Every check, the most basic first; what has to be compiled, which takes longest, last."""
    kinds = (linear.checks, exact.checks, mechanisms.checks, models.checks, captured.checks, mechanisms.compiled_checks)
    return [check for checks in kinds for check in checks(quick)]


__all__ = ["Check", "all_checks", "run_check"]
