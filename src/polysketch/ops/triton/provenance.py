"""What a figure found on this machine depends on: the device, Triton, and the source of the programs."""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

OPS = Path(__file__).resolve().parents[1]
_OWN_IMPORT = re.compile(r"^from polysketch\.ops\.([\w.]+) import", re.MULTILINE)


def provenance(program: str, device: torch.device) -> dict[str, str | list[int]]:
    """What makes a measurement of `program` hold: `device`, `capability`, `triton` and `source`; JSON values."""
    return {
        "device": device_name(device),
        "capability": capability(device),
        "triton": triton_version(),
        "source": source_digest(program),
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU; of no GPU, as under the interpreter, the type of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def capability(device: torch.device) -> list[int]:
    """Compute capability, [9, 0] for one; empty where there is no GPU."""
    return list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else []


@cache
def triton_version() -> str:
    """Of the Triton installed; "none" without."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


@cache
def source_digest(program: str) -> str:
    """SHA-256 of the modules that define a program and of those modules of programs that they import.

    Raises:
        FileNotFoundError: no such program.
    """
    sources = _sources()
    defines = re.compile(rf"^def {program}\w*\(", re.MULTILINE)  # variants have their program's name and more
    found = {path for path, text in sources.items() if defines.search(text)}
    if not found:
        raise FileNotFoundError(f"no module below {OPS} defines a program {program!r}")
    waiting = set(found)
    while waiting:
        waiting = _imported(waiting.pop(), sources) - found | waiting
        found |= waiting
    return digest(found)


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of files, by their order of name."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


@cache
def _sources() -> dict[Path, str]:
    """Path -> text of every module that holds programs."""
    texts = {path: path.read_text(encoding="utf-8") for path in OPS.rglob("*.py")}
    return {path: text for path, text in texts.items() if re.search(r"^@triton\.jit", text, re.MULTILINE)}


def _imported(path: Path, sources: dict[Path, str]) -> set[Path]:
    modules = _OWN_IMPORT.findall(sources[path])
    return {OPS / f"{module.replace('.', '/')}.py" for module in modules} & sources.keys()
