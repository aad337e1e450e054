"""Programs on a CPU, under Triton's interpreter: in their own process, for it is asked for before Triton is imported.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton, as `make test` does; elsewhere these modules skip. Their blocks
and sizes are made for the interpreter: on a GPU tests/device runs every program as it is used.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InterpretedModule(pytest.Module):
    """A module of tests that is not even imported where they cannot run."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs Triton", allow_module_level=True)
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("runs alone: TRITON_INTERPRET=1 pytest tests/ops/triton", allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Called by pytest for the modules of this folder alone."""
    return InterpretedModule.from_parent(parent, path=module_path)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nothing_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program has been checked by itself yet, and answers are kept apart."""
    from polysketch.ops.triton import self_check

    monkeypatch.setattr(self_check, "_file", lambda: tmp_path / "self_check.json")
    monkeypatch.setattr(self_check, "_answers", {})


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Names of the programs that run, in order."""
    from polysketch.ops.triton.launch import launching

    found = []

    def launch(kernel, programs, arguments, options):
        found.append(kernel.__name__)
        kernel[(programs,)](*arguments, **options)

    with launching(launch):
        yield found


class Operations(TorchDispatchMode):
    """Notes what PyTorch computes, inside our operators too; views and memory that is only asked for are free."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from polysketch.ops.custom_op import OPERATORS

        if func.name() in OPERATORS:
            with self:
                return OPERATORS[func.name()].compute(*args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor | list | tuple) and not func.is_view and "empty" not in func.name():
            self.found.append(func.name().removeprefix("aten::"))
        return result


@pytest.fixture
def operations() -> Iterator[AbstractContextManager[Operations]]:
    """Every one is a launch on a device, beside those of the programs, which do not run here."""
    from polysketch.ops.triton.launch import launching

    with launching(lambda *_: None):
        yield Operations()
