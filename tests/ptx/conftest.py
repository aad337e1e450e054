"""Programs are compiled here: modules that launch them need Triton, and not its interpreter."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


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
    launches = module_path.name in ("test_programs.py", "test_decoding.py")
    return LaunchingModule.from_parent(parent, path=module_path) if launches else None
