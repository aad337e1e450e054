"""A plugin of pytest: what each test found as a JSON line, a deadline, and every Nth test alone.

    python -m pytest -p benchmarks.recording --records FILE [--deadline SECONDS] [--every N]

It works with several processes by pytest-xdist: the one that hands out the tests writes.
"""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journal import Journal

NO_TIME = "no time left in this section"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The three options."""
    parser.addoption("--records", type=Path, help="file of JSON lines, continued")
    parser.addoption("--deadline", type=float, default=math.inf, help="seconds since 1970; tests are skipped from then")
    parser.addoption("--every", type=int, default=1, help="every Nth test alone")


def pytest_configure(config: pytest.Config) -> None:
    """Write in one process only."""
    path = config.getoption("--records")
    if path is not None and not hasattr(config, "workerinput"):  # which a process of pytest-xdist has
        config.pluginmanager.register(_Writer(Journal(path, keep=path.exists())), "polysketch-records")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every Nth of those that -k and -m left."""
    every = config.getoption("--every")
    if every > 1:
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % every])
        items[:] = items[::every]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test begins after the deadline."""
    if time.time() > item.config.getoption("--deadline"):
        pytest.skip(NO_TIME)


class _Writer:
    """Writes a record for every test, and for every module that cannot be imported."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Passed or failed, with its figures; or skipped, with the reason."""
        name = report.nodeid.removeprefix("tests/")
        if report.skipped:
            self._journal.write("skipped", section="checks", name=name, reason=_reason(report))
        elif report.failed or report.when == "call":
            figures: dict[str, Any] = dict(report.user_properties)
            error = {"error": _said(report)} if report.failed else {}
            self._journal.write(
                "check", name=name, passed=report.passed, seconds=round(report.duration, 3), **figures, **error
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported is no success."""
        if report.failed:
            self._journal.write("crashed", part=report.nodeid, error=_said(report))


def _reason(report: pytest.TestReport) -> str:
    place = report.longrepr
    return str(place[2] if isinstance(place, tuple) else place).removeprefix("Skipped: ")


def _said(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What was raised, without where."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    said = [line.strip() for line in lines if line.strip()] or [""]
    return said[0 if crash is not None else -1][:300]
