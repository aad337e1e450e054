"""What all tests share: the number of threads, and where outside data is."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # One process a core: threads of several processes would wait for one another, and burn the time that they wait.
    # The commands that tests start, too: four times as long, where all cores had other work.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
elif "OMP_NUM_THREADS" not in os.environ:
    # Small tensors: more threads than this cost more than they bring, on machines with many cores above all.
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without looking for garbage, and never look again at what is there then.

    Tens of thousands of tests are objects that stay: to go through them all again and again takes a tenth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no test of the full product that is left out anyway: a third of the time of collecting them.

    One of each function stays, for pytest takes a function without any for one without parameters.
    """
    expression = metafunc.config.option.markexpr
    if "not full" not in expression or "or not full" in expression:
        return
    whole = metafunc.definition.get_closest_marker("full") is not None
    calls = metafunc._calls
    always = [] if whole else [call for call in calls if all(mark.name != "full" for mark in call.marks)]
    metafunc._calls = always or calls[:1]


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder of outside data; the test is skipped, with the reason, where there is none."""
    folder = os.environ.get("POLYSKETCH_DATA", "")
    if not folder:
        pytest.skip("needs outside data: set POLYSKETCH_DATA to its folder")
    if not Path(folder).is_dir():
        pytest.fail(f"POLYSKETCH_DATA is {folder}, which is not a folder")
    return Path(folder)
