"""The run folder: where things are, and what config.json says."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch.storage import disk


@dataclass(frozen=True)
class RunFolder:
    """The places in a run folder.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """config.json: the resolved configuration, written once at the start (and when a run is extended)."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """A copy of the data folder's tokenizer and description, so that the run can be used without the data."""
        return self.path / "tokenizer"

    @property
    def plot(self) -> Path:
        """The plot of the loss."""
        return self.path / "loss.png"

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.path / "lock"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard files."""
        return self.path / "tensorboard"

    def has_run(self) -> bool:
        """Whether a run was started here: its configuration is the first thing a run writes."""
        return self.config.is_file()

    def foreign_files(self) -> list[str]:
        """What is in the folder although no run was started: not the lock, and no leftovers."""
        return sorted(p.name for p in self.path.iterdir() if p != self.lock and not disk.is_temporary(p))

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.json atomically."""
        disk.replace_file(self.config, json.dumps(config, indent=2).encode() + b"\n")

    def read_config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            FileNotFoundError: the folder does not exist or holds no run.
            ValueError: the file is not what `write_config` wrote.
        """
        if not self.has_run():
            raise FileNotFoundError(
                f"{self.config} is missing: expected a run folder made by `polysketch train`; check the path"
            )
        try:
            config = json.loads(self.config.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"{self.config}: expected JSON, found something else ({error}): altered by hand?"
            ) from error
        missing = list(_missing_entries(config))
        if missing and isinstance(config, dict) and "model_type" in config:
            raise ValueError(f"{self.path}: expected the folder of a training run, found a model of transformers")
        if missing:
            raise ValueError(
                f"{self.config}: expected the entries of a run's configuration, found none of {', '.join(missing)}: "
                "altered by hand, or written by another version?"
            )
        return config


_ENTRIES = {
    "training": ("context", "extend"),
    "resolved": ("dtype",),
    "model": (),
    "data": ("folder", "description_sha256"),
    "environment": (),
}
"""What config.json must hold: objects, and entries of them that are read by name."""


def _missing_entries(config: Any) -> Iterator[str]:
    """The names of the entries that are not there."""
    for name, keys in _ENTRIES.items():
        entry = config.get(name) if isinstance(config, dict) else None
        if not isinstance(entry, dict):
            yield name
            continue
        yield from (f"{name}.{key}" for key in keys if key not in entry)
