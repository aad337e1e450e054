"""PTX as text -> instructions, labels and parameters: what Triton writes, one statement a line.

Source of the syntax: NVIDIA, "Parallel Thread Execution ISA", chapters "Syntax" and "Instruction Operands".
"""

import re
from dataclasses import dataclass
from functools import cached_property

from ptx.formats import TYPES

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)")
_GUARD = re.compile(r"@(!?)(%\w+)\s+(.*)")
_LABEL = re.compile(r"(\$\w+):(.*)")
_OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{[])+")


class Fault(Exception):
    """A program did what no device allows, or what this executor does not know."""


@dataclass(frozen=True)
class Instruction:
    """One statement.

    Attributes:
        parts: of the opcode, which stand between dots.
        operands: as written, in order; vectors and addresses with their brackets.
        guard: the predicate register under which it is done; None where always.
        negated: whether it is done where the guard is false.
        text, line: the statement and where it stands, to name it.
    """

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    text: str
    line: int

    @cached_property
    def name(self) -> str:
        """The opcode's first word."""
        return self.parts[0]

    @cached_property
    def kind(self) -> str:
        """The type that it computes in: the last of the opcode."""
        return next(part for part in reversed(self.parts) if part in TYPES)

    @cached_property
    def vector(self) -> int:
        """Elements that a load or a store moves at once."""
        return next((int(part[1]) for part in self.parts if part in ("v2", "v4")), 1)

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        parameters: name -> type, in order.
        labels: name -> number of the instruction that follows.
    """

    name: str
    parameters: dict[str, str]
    instructions: list[Instruction]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """The only kernel of a module."""
    found = _ENTRY.search(text)
    if found is None:
        raise Fault("no kernel in this text")
    name, parameters, body = found.groups()
    program = Program(name, {each: kind for kind, each in _PARAMETER.findall(" ".join(parameters.split()))}, [], {})
    line = text[: found.start(3)].count("\n") + 1
    for number, written in enumerate(body.split("\n"), start=line):
        if written.startswith("$L__func_end") or written.lstrip().startswith(".section"):
            break
        for statement in written.partition("//")[0].split(";"):
            _add(program, statement.strip(), number)
    return program


def _add(program: Program, statement: str, line: int) -> None:
    """One statement: a label is noted, a directive left out."""
    while (label := _LABEL.match(statement)) is not None:
        program.labels[label[1]] = len(program.instructions)
        statement = label[2].strip()
    statement = _without_scope(statement)
    if statement and statement[0] != ".":
        program.instructions.append(_instruction(statement, line))


def _without_scope(statement: str) -> str:
    """Without the braces of a scope: those that have no partner in the statement."""
    if statement.startswith("{") and statement.count("{") > statement.count("}"):
        statement = statement[1:]
    elif statement.endswith("}") and statement.count("}") > statement.count("{"):
        statement = statement[:-1]
    return statement.strip()


def _instruction(statement: str, line: int) -> Instruction:
    guard = _GUARD.match(statement)
    opcode, _, rest = (guard[3] if guard else statement).partition(" ")
    operands = tuple(each.strip() for each in _OPERAND.findall(rest) if each.strip())
    negated = guard is not None and guard[1] == "!"
    return Instruction(tuple(opcode.split(".")), operands, guard and guard[2], negated, statement, line)


def registers_of(operand: str) -> list[str]:
    """Those of a vector in braces; a single one is a vector of one."""
    return [each.strip() for each in operand.strip("{} \t").split(",")]
