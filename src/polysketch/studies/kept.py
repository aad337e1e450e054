"""Records: one JSON file for each finished variant, with what is needed to judge or repeat it."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polysketch.benchmarking.environment import commit, processor
from polysketch.benchmarking.workbench import save
from polysketch.storage.outside import read_object
from polysketch.training.environment import describe_environment, resolve_device


def provenance(device: str = "auto") -> dict[str, Any]:
    """Hardware, versions, commit and time of a measurement; JSON values."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        **describe_environment(resolve_device(device)),
    }


def read(path: Path, *needed: str) -> dict[str, Any]:
    """Read a record.

    Args:
        path: of its file.
        needed: names that it has to have beside its settings.

    Raises:
        ValueError: the file is no object of JSON with these.
    """
    try:
        found = read_object(path, "settings", *needed)
        if not isinstance(found["settings"], dict):
            raise ValueError(f"{path}: expected an object as settings, found {type(found['settings']).__name__}")
        return found
    except ValueError as error:
        raise ValueError(f"expected a record of a study: {error}: delete it") from error


def digest(settings: Mapping[str, Any]) -> str:
    """Eight letters that tell settings apart; equal settings have the same."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def kept_or_made(path: Path, settings: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The record in `path` if there is one, else a new one, written there.

    Args:
        path: the record's file.
        settings: what the result depends on; JSON values, kept in the record.
        make: gives the rest of the record; called only when there is no file.

    Raises:
        ValueError: the record that is there was made with other settings; they are named.
    """
    settings = json.loads(json.dumps(settings))
    if not path.is_file():
        save({"settings": settings, **make()}, path)
        return read(path)
    record = read(path)
    _check_settings(path, record["settings"], settings)
    return record


def _check_settings(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if changed:
        listed = ", ".join(f"{name} was {old.get(name)} and is now {new.get(name)}" for name in changed)
        remedy = "give another --results, or delete it to repeat"
        raise ValueError(f"{path} was made with other settings: {listed}; {remedy}")


def publish(record: Mapping[str, Any], name: str, folder: Path) -> list[dict[str, Any]]:
    """Write a record into the results folder as NAME.json, and return all records there, sorted by name."""
    save(record, folder / f"{name}.json")
    return [read(path) for path in sorted(folder.glob("*.json"))]
