"""What of the machine and the installed versions a result can depend on."""

import contextlib
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy
import torch

import polysketch
from polysketch.models.fingerprint import programs_fingerprint


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor and thread count, for config.json; JSON values."""
    return {
        "polysketch": polysketch.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        **({"native programs": programs_fingerprint()} if device.type == "cpu" else {}),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that `name` means; `auto` takes CUDA if it is there.

    Args:
        name: see `--device`.
        local_rank: of several processes, the number of this one on its machine: CUDA's device of this number is its.

    Raises:
        ValueError: not the name of a device, or one that this machine or this PyTorch does not have, or one for all of
            several processes.
    """
    if local_rank is not None:
        name = _of_process(name, local_rank)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" makes tensors, but they hold nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = "auto, cpu" + "".join(f", cuda:{index}" for index in range(torch.cuda.device_count()))
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device: expected one of {there}, found {name!r} ({reason})") from error
    return device


def _of_process(name: str, local_rank: int) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda for several processes, found {name!r}")
    return f"cuda:{local_rank}" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu"


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of matrix products that `name` means: `auto` is bfloat16 on CUDA and float32 elsewhere."""
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"auto": default, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@contextlib.contextmanager
def use_threads(number: int | None) -> Iterator[None]:
    """Compute with so many CPU threads inside; with PyTorch's choice when None."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Take, inside, the variants of CUDA operations that give the same bits every time; a CPU needs nothing.

    An operation that has no such variant is still carried out, with a warning.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module with properties, which type checkers do not see
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a precaution for reading unwritten memory; costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
