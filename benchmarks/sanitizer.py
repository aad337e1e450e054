"""NVIDIA's compute-sanitizer over every program at small sizes: accesses out of bounds, where the tool is installed.

As a module it is what runs under the tool: `compute-sanitizer python -m benchmarks.sanitizer`.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import Process
from polysketch.benchmarking.program_calls import ProgramCall, most_common_first, program_calls

_TOOL = "compute-sanitizer"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_WRONG = 99  # exit status that the tool is asked for where it found something
_SIZES = (1, 2, 83)  # batch, heads, length: no multiple of anything
_RAN = "ran: "  # before the name of every call that came to its end
_FINDINGS = ("Invalid ", "Misaligned", "Out-of-range", "llegal ")
_NOT_HERE = ("Device not supported", "is not supported on this")  # some virtual machines do not let it look on


def start() -> Process | str:
    """The tool at work on this file's `main`, or the reason why not."""
    tool = find_tool()
    if tool is None:
        return f"{_TOOL} is not installed"
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(_WRONG), sys.executable, "-m", __name__]
    # Every tensor in memory of its own: else an access past one lands in another.
    return Process(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def finish(running: Process | str, seconds: float) -> dict[str, Any]:
    """A record of what the tool says within that time; `passed` is None where it says nothing."""
    if isinstance(running, str):
        return {"name": _TOOL, "passed": None, "reason": running}
    status, _, lines = running.watch(time.monotonic() + max(1.0, seconds))
    passed, reason = _verdict(status, lines)
    reports = [line for line in lines if line.startswith("=========")][:40]
    return {"name": _TOOL, "passed": passed, "reason": reason, "reports": reports, "last_lines": lines[-3:]}


def _verdict(status: int | None, lines: list[str]) -> tuple[bool | None, str | None]:
    refused = next((line for line in lines if any(text in line for text in _NOT_HERE)), None)
    if refused is not None:
        return None, refused.removeprefix("=========").strip()
    if status is None:
        return None, "not done in time"
    if status not in (0, _WRONG):
        return None, f"exit status {status}"
    seen = any(line.startswith(_RAN) or any(text in line for text in _FINDINGS) for line in lines)
    if not seen:
        return None, f"no program came to its end, exit status {status}"
    return status == 0, None


def find_tool() -> str | None:
    """Where the tool is: on the path, or with the CUDA toolkit."""
    found = shutil.which(_TOOL)
    beside = [str(Path(place) / _TOOL) for place in _PLACES if (Path(place) / _TOOL).is_file()]
    return found or next(iter(beside), None)


def main(device: str = "cuda", most: int = 24) -> None:
    """Run the commonest calls of every op once, forward and backward; the tool looks on."""
    chosen: Sequence[ProgramCall] = most_common_first(program_calls(dtypes=("bfloat16", "float32")))[:most]
    for call in chosen:
        call.passes(call.build(torch.device(device), *_SIZES))()
        print(f"{_RAN}{call.name} {call.dtype}", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
