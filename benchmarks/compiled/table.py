"""Programs as compiled: lines of a file, and a short table of them."""

import csv
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path

import torch

from polysketch.benchmarking import calls
from polysketch.benchmarking.compiled import compile_call, complaints
from polysketch.benchmarking.environment import commit
from polysketch.benchmarking.program_calls import ProgramCall

_META = torch.device("meta")
_BATCH, _HEADS, _LENGTH = 2, 8, 4_096


@dataclass(frozen=True)
class Line:
    """A program as compiled for a target; `call` is the first that launched it so."""

    target: str
    program: str
    dtype: str
    call: str
    constants: str
    registers: int
    spills: int
    shared_bytes: int
    tensor_core_instructions: int
    instructions: int
    complaints: str
    triton: str
    commit: str

    @property
    def key(self) -> tuple:
        """What makes it another program."""
        return self.target, self.program, self.dtype, self.constants


def lines_of(call: ProgramCall, target: str, capability: tuple[int, int], *, backward: bool) -> list[Line]:
    """The programs of one call, forward and, where there is one and it is wanted, backward."""
    made = call.build(_META, _BATCH, _HEADS, _LENGTH)
    prepare = calls.forward_backward if backward and call.differentiable else calls.forward
    versions = {"triton": metadata.version("triton"), "commit": commit()[:12]}
    return [
        Line(
            target=target,
            program=one.name,
            dtype=call.dtype,
            call=call.name,
            constants=json.dumps({name: str(value) for name, value in one.constants.items()}),
            registers=one.registers,
            spills=one.spills,
            shared_bytes=one.shared,
            tensor_core_instructions=one.tensor_core,
            instructions=sum(one.opcodes.values()),
            complaints="; ".join(complaints(one, capability)),
            **versions,
        )
        for one in compile_call(lambda: prepare(made)(), capability)
    ]


def write(lines: list[Line], path: Path) -> None:
    """As comma-separated values; the old file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
    partial.replace(path)


def failures(lines: list[Line]) -> list[Line]:
    """What spills or does not fit."""
    return [line for line in lines if line.complaints]


def print_summary(lines: list[Line]) -> None:
    """For each program and target the largest of everything, and the fewest tensor-core instructions."""
    groups: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line.program, line.dtype, line.target].append(line)
    print(
        f"{'program':<34}{'dtype':>10}{'target':>8}{'compiled':>9}{'registers':>10}{'spills':>7}{'KB':>7}{'tensor':>7}"
    )
    for (program, dtype, target), group in sorted(groups.items()):
        most = max(line.registers for line in group), max(line.spills for line in group)
        kilobytes = max(line.shared_bytes for line in group) / 1024
        tensor = min(line.tensor_core_instructions for line in group)
        print(
            f"{program:<34}{dtype:>10}{target:>8}{len(group):>9}{most[0]:>10}{most[1]:>7}{kilobytes:>7.0f}{tensor:>7}"
        )
    for line in failures(lines):
        print(f"BAD {line.program}, {line.target}, {line.dtype} ({line.call}): {line.complaints}; {line.constants}")
