"""Programs are compiled here: modules that launch them need Triton, and not its interpreter."""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polysketch.benchmarking.timing import matmul_precision

CAPABILITIES = [(9, 0), pytest.param((8, 0), marks=pytest.mark.full)]


class LaunchingModule(pytest.Module):
    """A module of tests that is not even imported where they cannot run."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs Triton", allow_module_level=True)
        if os.environ.get("TRITON_INTERPRET") == "1":
            pytest.skip("nothing is compiled under TRITON_INTERPRET=1", allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called by pytest for the modules of this folder alone."""
    launches = module_path.name in ("test_programs.py", "test_decoding.py", "test_hyper.py", "test_window.py")
    return LaunchingModule.from_parent(parent, path=module_path) if launches else None


@pytest.fixture
def _fresh_memory_is_nan() -> Iterator[None]:
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=CAPABILITIES, ids=["sm_90", "sm_80"])
def launched(request: pytest.FixtureRequest, _fresh_memory_is_nan: None) -> Iterator[Counter[str]]:
    """Names of the programs that this device executed."""
    from ptx.launching import executing  # imports Triton

    with executing(request.param) as counter, matmul_precision("highest"):
        yield counter
