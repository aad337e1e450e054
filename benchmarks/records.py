"""What was measured, where, and with which code: environment, and JSON lines written as they come."""

import datetime
import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

import polysketch
from benchmarks import ROOT


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit and precision settings; JSON values."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "numpy": numpy.__version__,
        "polysketch": polysketch.__version__,
        "commit": commit(),
        "source_sha256": source_digest(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit checked out, with "+" where the source differs from it; "unknown" outside a repository."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "src") else "")


def source_digest() -> str:
    """sha256 over the package's source: says which code ran also where there is no repository."""
    digest = hashlib.sha256()
    for file in sorted(Path(polysketch.__file__).parent.rglob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def stamped(prefix: str, suffix: str) -> str:
    """A file name with the time in it."""
    return f"{prefix}-{datetime.datetime.now():%Y%m%d-%H%M%S}{suffix}"


class Journal:
    """A file of JSON lines, each on disk as soon as it is known: what a killed run leaves is worth reading.

    Args:
        path: created, with its folder; an existing file is replaced.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records: list[dict[str, Any]] = []
        path.write_text("")

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append one record."""
        record = {"kind": kind, **values}
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind so far."""
        return [record for record in self.records if record["kind"] == kind]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
