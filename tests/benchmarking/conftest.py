"""A workbench for tiny sizes: its rates are made up, for tests of speed are none of these."""

import pytest
import torch

from polysketch.benchmarking import Workbench
from polysketch.benchmarking.timing import Clock, Rates


@pytest.fixture
def bench() -> Workbench:
    """A CPU that does a thousandth of an operation in the time of ours, once."""
    return Workbench(clock=Clock(torch.device("cpu")), rates=Rates(1e11, 1e10), repeats=2)
