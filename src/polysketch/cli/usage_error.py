"""Wrong usage in one line: what tyro says in a box of many, without its words for types."""

import re
from collections.abc import Sequence

_RULE = re.compile(r"─{5,}")
_EDGE = re.compile(r"^│ ?| ?│$")
_FLAG = re.compile(r"^ {4}(-{1,2}[\w-]+|[A-Z][A-Z_]*)\b")
_NOT_SET = "{None}|"
_LISTED = re.compile(r"Could not find valid parse for arguments: \['(.*,.*)'\]\.?")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def usage_line(box: str, command: str) -> str:
    """What is wrong with a command line, and where its flags are listed.

    Args:
        box: what tyro printed.
        command: for instance "polysketch train".

    Returns:
        One line, without a line break.
    """
    what, *rest = _parts(box)
    said = " ".join(line.strip() for line in what)
    after = [line for part in rest for line in part]
    if said.startswith("Unrecognized options: "):
        unknown = said.removeprefix("Unrecognized options: ")
        problem = f"no such flag or argument: {unknown}{_meant(after) or _commas(unknown)}"
    elif said.startswith("Missing from "):
        problem = f"needed: {', '.join(_names(what))}{_unknown_too(rest)}"
    elif said.startswith("Error parsing "):
        problem = _unreadable(said, after)
    else:
        problem = said.rstrip(".")
    return f"{command}: {problem}; {command} --help lists what it takes"


def _parts(box: str) -> list[list[str]]:
    """The lines inside the box, divided where it has a rule; its edge is one, too."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        if line.startswith(("╭", "╰")):
            continue
        if _RULE.search(line):
            parts.append([])
        else:
            parts[-1].append(_EDGE.sub("", line).rstrip())
    return parts


def _names(lines: Sequence[str]) -> list[str]:
    """The flags and arguments that lines begin with, deeper lines are their help."""
    found = (_FLAG.match(line) for line in lines)
    return [match[1] for match in found if match]


def _unknown_too(parts: Sequence[Sequence[str]]) -> str:
    """What is not known beside what is missing."""
    lists = (lines[1:] for lines in parts if lines[:1] == ["Unrecognized options:"])
    words = [line.strip() for lines in lists for line in lines]
    return f"; no such flag or argument: {', '.join(words)}" if words else ""


def _meant(after: Sequence[str]) -> str:
    names = _names(after)
    return f" (like {', '.join(dict.fromkeys(names))}?)" if names else ""


def _commas(unknown: str) -> str:
    """A hint for the rest of a list that was given with spaces between, to a flag that takes commas or one number."""
    return " (a flag takes one value, or some with commas between)" if _NUMBER.fullmatch(unknown.split(", ")[0]) else ""


def _unreadable(said: str, after: Sequence[str]) -> str:
    """A value that is none of the kind: which flag, what it takes, what was found."""
    flag, _, reason = said.removeprefix("Error parsing ").partition(": ")
    if not flag.startswith("-"):  # the class of the flags: the flag itself is in its reason
        return reason.rstrip(".")
    listed = _LISTED.fullmatch(reason)
    if listed:
        return f"{flag}: expected values with spaces between, found {listed[1]}"
    kind = next(
        (line.split(maxsplit=1)[1] for line in after if line.split()[:1] == [flag] and len(line.split()) > 1), ""
    )
    found = re.search(r"instantiated from \[(.*?)\]\.|with base 10: (.*)$|to float: (.*)$", reason)
    if not kind or not found:
        return f"{flag}: {reason.replace(_NOT_SET, '').rstrip('.')}"
    return f"{flag}: expected {kind.replace(_NOT_SET, '')}, found {next(each for each in found.groups() if each)}"
