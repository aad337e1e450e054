"""What must be the same on all processes of a run, and how they are told apart where it is not."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polysketch

_SHOWN = 60


def code_digest() -> str:
    """sha256 of all Python and C++ files of this package, names and contents; 16 digits."""
    root = Path(polysketch.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def disagreement(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """What differs among processes, in one line that names ranks and values; None where nothing does.

    Args:
        facts: of each process, by rank: names -> values.
    """
    names = {name: None for each in facts for name in each}
    differing = [name for name in names if any(each.get(name) != facts[0].get(name) for each in facts)]
    if not differing:
        return None
    listed = "; ".join(_values(name, [each.get(name) for each in facts]) for name in differing)
    return f"expected the same on all processes, found {listed}: start all with one command, code and data"


def _values(name: str, values: Sequence[Any]) -> str:
    """A fact with the ranks that have each of its values, the most frequent first."""
    texts = [str(value) for value in values]
    ranks = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
    ordered = sorted(ranks, key=lambda text: -len(ranks[text]))
    return f"{name} " + " and ".join(f"{_short(text)} on {_ranks(ranks[text])}" for text in ordered)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 3`, `ranks 0 to 6`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
