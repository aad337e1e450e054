"""The folder of a run: where things are, and what config.json says; known without PyTorch."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch.data.description import DESCRIPTION_FILE, DataDescription
from polysketch.models.former import FORMAT, check_format, model_of_format, training_of_format
from polysketch.storage import disk
from polysketch.storage.outside import read_object
from polysketch.storage.sealed import sealed, unsealed
from polysketch.storage.sums import sha256_of
from polysketch.training.checkpoint import find_checkpoint
from polysketch.training.metrics_file import MetricsFile

IDENTITY = "identity"
"""In config.json: what tells the run from others; see `options.identity_of`. Its checkpoints say the same."""


@dataclass(frozen=True)
class LoopFolder:
    """The places in every folder that a loop works in.

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
    def lock(self) -> Path:
        """The lock file."""
        return self.path / "lock"

    def has_run(self) -> bool:
        """Whether a run was started here: its configuration is the first thing a run writes."""
        return self.config.is_file()

    def config_digest(self) -> str | None:
        """sha256 of config.json, None where there is none."""
        return hashlib.sha256(self.config.read_bytes()).hexdigest() if self.config.is_file() else None

    def open_metrics(self) -> MetricsFile:
        """The file of metrics, whose lines say of which run they are; once config.json is written."""
        return MetricsFile(self.metrics, self.identity())

    def require_own(self) -> None:
        """Refuse links in the place of what a loop writes: it would write where they point to.

        The folder of checkpoints may be one, to another disk.

        Raises:
            ValueError: names the link.
        """
        names = ("config.json", "lock", "metrics.jsonl", "report.json", "model", "tokenizer", "task", "tensorboard")
        for path in (self.path / name for name in (*names, "loss.png", "report.png")):
            if path.is_symlink():
                raise ValueError(
                    f"{path}: expected a file or folder of the run's own, found a symbolic link, through which this "
                    "command would write; only checkpoints may be one"
                )

    def require_free(self) -> None:
        """Refuse a folder in which no run was started and which holds something else than the lock and leftovers.

        Raises:
            ValueError: names what it holds.
        """
        there = self.path.iterdir() if self.path.exists() else ()
        foreign = sorted(p.name for p in there if p != self.lock and not disk.is_temporary(p))
        if foreign:
            raise ValueError(
                f"{self.path}: expected an empty folder or a run folder, found {foreign[0]!r} and no config.json: "
                "give another --out"
            )

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json atomically, with a sha256 of itself."""
        disk.replace_file(self.config, json.dumps(sealed(config), indent=2).encode() + b"\n")

    def identity(self) -> str | None:
        """What tells this run from others; None where an earlier version began it, or none is begun yet."""
        return read_object(self.config).get(IDENTITY) if self.has_run() else None


@dataclass(frozen=True)
class RunFolder(LoopFolder):
    """The places in the folder of a training run."""

    @property
    def tokenizer(self) -> Path:
        """A copy of the data folder's tokenizer and description, so that the run can be used without the data."""
        return self.path / "tokenizer"

    @property
    def task(self) -> Path:
        """Where the task.json of the task that was learned is kept, so that the model can be used without the task."""
        return self.path / "task"

    @property
    def plot(self) -> Path:
        """The plot of the loss."""
        return self.path / "loss.png"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard files."""
        return self.path / "tensorboard"

    def read_config(self) -> dict[str, Any]:
        """Read config.json; one of an earlier version as this version would have written it.

        Raises:
            FileNotFoundError: the folder does not exist or holds no run.
            ValueError: the file is not what a training run wrote.
        """
        if not self.has_run():
            raise FileNotFoundError(
                f"{self.config} is missing: expected a run folder made by `polysketch train`; check the path"
            )
        config = unsealed(read_object(self.config), str(self.config))
        check_format(config.get("format", FORMAT), str(self.config))
        missing = list(_missing_entries(config))
        if missing and "model_type" in config:
            raise ValueError(f"{self.path}: expected the folder of a training run, found a model of transformers")
        if missing and "conversion" in config:
            raise ValueError(
                f"{self.path}: expected the folder of a training run, found that of a conversion: its model is in "
                f"{self.path / 'model'}, once the conversion has ended"
            )
        if missing:
            raise ValueError(
                f"{self.config}: expected the entries of a run's configuration, found none of the right type of "
                f"{', '.join(missing)}: altered by hand, or written by another version?"
            )
        return _of_today(config)


def _of_today(config: dict[str, Any]) -> dict[str, Any]:
    written = config.get("format", FORMAT)
    if written == FORMAT:
        return config
    training = training_of_format(written, config["training"], config["model"])
    return {**config, "format": FORMAT, "training": training, "model": model_of_format(written, config["model"])}


_ENTRIES: dict[str, dict[str, type]] = {
    "training": {"context": int, "extend": object},
    "resolved": {"dtype": str},
    "model": {},
    "data": {"folder": str, "description_sha256": str},
    "environment": {},
}
"""What config.json must hold: objects, and entries of them that are read by name, with their types.

`object` is any."""


def _missing_entries(config: Any) -> Iterator[str]:
    """The names of the entries that are not there, or of another type."""
    for name, kinds in _ENTRIES.items():
        entry = config.get(name) if isinstance(config, dict) else None
        if not isinstance(entry, dict):
            yield name
            continue
        known = {key for key, kind in kinds.items() if key in entry and kind in (object, type(entry[key]))}
        yield from (f"{name}.{key}" for key in kinds if key not in known)


def find_run(run_dir: str | Path, checkpoint: str = "latest") -> tuple[dict[str, Any], Path]:
    """The configuration of a run, and the folder of one of its checkpoints.

    Args:
        run_dir: the run folder.
        checkpoint: a checkpoint's folder name, for instance `step-00000100`, `latest`, or `best`, that of the least
            validation loss.

    Raises:
        FileNotFoundError: no run, or no such checkpoint; the message lists those that exist.
        ValueError: config.json is not what a training run wrote.
    """
    run = RunFolder(Path(run_dir))
    return run.read_config(), find_checkpoint(run.checkpoints, checkpoint)


def require_own_tokenizer(run: RunFolder) -> None:
    """Refuse a tokenizer that is not that of the data which the run learned from, but another run's.

    Raises:
        ValueError: the descriptions differ.
    """
    config = run.read_config()
    if IDENTITY not in config or task_of_run(config) is not None:
        return  # imported, or of an earlier version; what a task's rows were made of is not known by its run
    file, expected = run.tokenizer / DESCRIPTION_FILE, config["data"]["description_sha256"]
    found = sha256_of(file)
    if expected not in (found, DataDescription.read(file).sha256):  # the second of token files that others made
        raise ValueError(
            f"{file}: expected the description of the data that the run learned from, of sha256 {expected[:12]}, "
            f"found {found[:12]}: copied from another run?"
        )


def task_of_run(config: Mapping[str, Any]) -> str | None:
    """The name of the task that a run of this configuration learned; None where it learned text."""
    return config["data"].get("task")


def require_text(run_dir: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse a run that learned a task, where a language model of text is asked for.

    Raises:
        ValueError: naming the task.
    """
    task = task_of_run(config)
    if task is not None:
        raise ValueError(
            f"{run_dir}: expected a run that learned text, found one that learned the task {task!r}: polysketch "
            "evaluate measures it, polysketch.training.load_answering_model gives its model"
        )
