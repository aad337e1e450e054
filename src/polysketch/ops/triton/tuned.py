"""What `polysketch benchmark tune` found on this machine: kept in the user's cache folder, one file for each program.

A file has the form of the shipped ones, and each entry says what it was `found_with`: device, Triton, and a digest of
the program's source. It is used for the same alone. Blocks that were the fastest elsewhere may be slow here, and what
the check at tuning found right may be wrong.
"""

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from polysketch.ops.triton.provenance import provenance
from polysketch.user_cache import user_cache

FOUND_WITH = "found_with"


def tuned_file(program: str) -> Path:
    """Where `polysketch benchmark tune` keeps what it found for a program."""
    return user_cache() / "triton" / f"{program}.json"


def tuned_entries(program: str, generation: str, device: torch.device) -> list[dict[str, Any]]:
    """The entries of a program that were found with what is here; of others it is said once that they are not used."""
    path = tuned_file(program)
    found = _read(path, generation)
    if not found:
        return []
    here = provenance(program, device)
    fitting = [one for one in found if one.get(FOUND_WITH) == here]
    stale = [one for one in found if one not in fitting and _on_this(one, here)]
    if stale:
        _say(path.parent, "they were found with another Triton, or other programs")
    return fitting


def _on_this(entry: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether an entry may be for this device, or does not say: those for others are nobody's mistake."""
    with_ = entry.get(FOUND_WITH)
    return not isinstance(with_, Mapping) or with_.get("device") == here["device"]


def _read(path: Path, generation: str) -> list[dict[str, Any]]:
    """The entries of a file; none where it is absent or cannot be read, which is said once."""
    try:
        found = json.loads(path.read_text())[generation]
        return [one for one in found if isinstance(one["where"], dict) and isinstance(one["use"], dict)]
    except (FileNotFoundError, KeyError):
        return []
    except (OSError, ValueError, TypeError) as error:
        _say(path.parent, f"{path.name} cannot be read ({type(error).__name__})")
        return []


@cache
def _say(folder: Path, reason: str) -> None:
    warnings.warn(
        f"tuned configurations in {folder} are not used: {reason}; `polysketch benchmark tune` finds new ones",
        stacklevel=2,
    )
