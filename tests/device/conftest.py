"""The same calls on every device: `device` is the CPU, Triton's interpreter, or a GPU, each where it is here.

    python -m pytest -m device                                     on this CPU and, where there is one, on its GPU
    python -m pytest -m "device and not full"                      on the GPU alone
    TRITON_INTERPRET=1 python -m pytest tests/device -k interpreter     the programs on a CPU

On a GPU sizes are those that are used; elsewhere they are small.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from device.yardstick import Device, poison, usable
from polysketch.benchmarking.timing import matmul_precision

ALL = ("cpu", "interpreter", "cuda")


def why_not(name: str) -> str | None:
    """Why a device is not here; None where it is."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "interpreter":
        if importlib.util.find_spec("triton") is None:
            return "needs Triton"
        return None if interpreting else "runs alone: TRITON_INTERPRET=1 pytest tests/device -k interpreter"
    if name == "cuda":
        return "there is no GPU" if interpreting or not torch.cuda.is_available() else None
    return "TRITON_INTERPRET=1 is for the interpreter alone" if interpreting else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device` is every device; `computer` those that have no interpreter: it runs programs that are asked for."""
    for fixture, names in (("device", ALL), ("computer", ("cpu", "cuda"))):
        if fixture in metafunc.fixturenames:
            # Minutes: ops/triton has the cases that are made for the interpreter, the other tests compute on the CPU.
            marks = {"interpreter": pytest.mark.full, "cpu": pytest.mark.full}
            devices = [pytest.param(Device(name), marks=marks.get(name, ())) for name in names]
            metafunc.parametrize(fixture, devices, ids=names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests, and skip those whose device is not here."""
    reasons = {name: why_not(name) for name in ALL}
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.device)
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        device = parameters.get("device", parameters.get("computer"))
        if device is not None and (reason := reasons[device.name]) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a program forgets to write is NaN; and float32 products are products of float32."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    device = parameters.get("device", parameters.get("computer", Device("cpu")))
    torch.use_deterministic_algorithms(device.where.type == "cpu")  # fills fresh memory there
    poison(device.where)
    with matmul_precision("highest"):
        yield
    torch.use_deterministic_algorithms(False)
    if not usable(device.where):  # after an access out of bounds every call fails: the other tests need a new process
        os._exit(3)
