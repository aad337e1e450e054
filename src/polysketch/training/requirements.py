"""What a run has to find before it starts. PyTorch takes a second to load, and is not needed to tell."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from polysketch.data import DataDescription, PreparedData, TokenizerLike
from polysketch.data.foreign import tokenizer_of_ids
from polysketch.data.prepared import is_foreign, read_description, split_in
from polysketch.extras import how_to_install
from polysketch.models.presets import preset_fields
from polysketch.nn.names import check_mixer_name
from polysketch.tasks.description import is_task, read_task_description
from polysketch.training.checkpoint import find_checkpoint, list_checkpoints
from polysketch.training.config import TrainingConfig
from polysketch.training.options import flag
from polysketch.training.run_folder import RunFolder, find_run


def check_names(preset: str, attention: str | Sequence[str] | None) -> None:
    """Refuse an unknown preset, or a mechanism or layer that does not exist.

    Raises:
        ValueError: naming those that exist.
    """
    preset_fields(preset)
    for name in [attention] if isinstance(attention, str) else attention or ():
        check_mixer_name(name)


def check_requirements(config: TrainingConfig) -> None:
    """Refuse what no run can start with: its data, its folder, or the other run whose weights it takes.

    Raises:
        FileNotFoundError: one of them, or the checkpoint to go on from, is missing.
        ValueError: one of them is damaged, too short, in use for something else, or holds a run already; or the
            package of a tracker is not installed.
    """
    if is_task(config.data):
        check_task(config)
    else:
        check_masked_text(config)
        check_data(config, _description(config))
    goes_on = starting_checkpoint(config) is not None
    if config.init_from is not None and not goes_on:  # weights are taken once
        find_run(config.init_from)
    if config.tracker != "none" and importlib.util.find_spec(config.tracker) is None:
        raise ValueError(f"--tracker {config.tracker}: {how_to_install(config.tracker)}")


VERIFIED_AT_START = 2**36
"""Bytes of text up to which every start of a run reads and verifies all of it: two minutes, from a fast disk."""


def verify_at_start(data: PreparedData) -> None:
    """Compare the sha256 of what a run reads, training and validation.

    Files of more than 64 GiB in all, which take minutes, are compared once a version and machine.

    Raises:
        ValueError: a file was altered; it is named.
    """
    names = [name for name in data.description.splits if name != "test"]
    size = sum(data.description.splits[name].bytes for name in names)
    data.verify(*names, once=size > VERIFIED_AT_START)


def tokenizer_of_data(config: TrainingConfig) -> TokenizerLike | None:
    """What made the ids of token files that polysketch did not prepare; None for a prepared folder.

    Raises:
        FileNotFoundError: there is no such tokenizer.
        ValueError: too much is said, or something about a prepared folder, which has its own tokenizer.
    """
    given = [name for name in ("tokenizer", "vocab_size", "end_of_text") if getattr(config, name) is not None]
    if given and not is_foreign(config.data):
        raise ValueError(
            f"--{given[0].replace('_', '-')}: expected token files that polysketch did not prepare, found "
            f"{config.data}, a folder with its own tokenizer: leave it out"
        )
    return tokenizer_of_ids(config.tokenizer, config.vocab_size, config.end_of_text)


def _description(config: TrainingConfig) -> DataDescription:
    tokenizer = tokenizer_of_data(config)
    if is_foreign(config.data):
        return PreparedData.open(config.data, tokenizer).description
    return read_description(config.data)


def check_data(config: TrainingConfig, data: DataDescription) -> None:
    """Refuse data without a split that is needed, or with less training text than a window.

    Raises:
        ValueError: says what there is.
    """
    if config.eval_every and "validation" not in data.splits:
        raise ValueError(
            f"--data: expected a validation split in {config.data}, found {', '.join(data.splits)}: "
            "prepare the data with one, or train without evaluation by --eval-every 0"
        )
    found = split_in(config.data, data, "train").tokens
    if found < config.context + 1:
        raise ValueError(
            f"--context {config.context}: expected at least {config.context + 1} training tokens in {config.data}, "
            f"found {found}: choose a shorter context or prepare more text"
        )


def check_task(config: TrainingConfig) -> None:
    """Refuse options that mean nothing where a task is learned, and a task that is damaged or has no validation rows.

    Raises:
        ValueError: names the option, or what is missing.
    """
    description = read_task_description(config.data)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    run = RunFolder(config.out)
    resumed = run.read_config()["training"] if config.resume and run.has_run() else {}
    for name in _OF_TEXT:
        if getattr(config, name) not in (defaults[name], resumed.get(name, defaults[name])):
            raise ValueError(f"{flag(name)}: {config.data} is a task, which has no use for it: leave it out")
    if config.eval_every and description["splits"] and "validation" not in description["splits"]:
        raise ValueError(
            f"--data: expected validation rows in {config.data}, found {', '.join(description['splits'])}: make the "
            "task with some, or train without evaluation by --eval-every 0"
        )


_OF_TEXT = ("tokenizer", "vocab_size", "end_of_text", "context", "pack", "carry_state", "validation")
"""Options that mean nothing for a task."""


def check_masked_text(config: TrainingConfig) -> None:
    """Refuse options that say how documents are read, where hidden tokens of windows are learned.

    Raises:
        ValueError: names the option.
    """
    if config.objective != "masked":
        return
    given = {
        "--carry-state": config.carry_state,
        f"--pack {config.pack}": config.pack == "documents",
        f"--validation {config.validation}": config.validation not in ("auto", "windows"),
    }
    for name in (name for name, found in given.items() if found):
        raise ValueError(f"{name}: expected windows of text for --objective masked: leave one of them out")


def starting_checkpoint(config: TrainingConfig) -> Path | None:
    """Where a run starts in its folder: a checkpoint, or None for its beginning. Writes nothing.

    Raises:
        ValueError: the folder holds a run and `resume` was not asked for, or other files.
        FileNotFoundError: the checkpoint asked for is not there.
    """
    run = RunFolder(config.out)
    if not run.has_run():
        run.require_free()
        if config.extend or config.checkpoint != "latest":
            raise FileNotFoundError(
                f"--extend and --checkpoint go on with a run: expected one in {run.path}, found none"
            )
        return None
    if not config.resume:
        raise ValueError(
            f"{run.path} already holds a run: give --resume to go on with it, or another --out to start a new one"
        )
    run.read_config()
    if not list_checkpoints(run.checkpoints) and config.checkpoint == "latest":
        _require_no_step(run)
        return None  # killed before the first checkpoint was complete
    return find_checkpoint(run.checkpoints, config.checkpoint)


def _require_no_step(run: RunFolder) -> None:
    """Refuse to begin a run again that had checkpoints: its metrics tell of steps, before which the first is written.

    Raises:
        FileNotFoundError: with the last step.
    """
    last = max((line["step"] for line in run.open_metrics().read()), default=0)
    if last:
        raise FileNotFoundError(
            f"expected checkpoints in {run.checkpoints}, found none, though the run has made {last:,} steps: put them "
            "back, or give another --out to start a new run"
        )


def require_folder(folder: Path) -> None:
    """Refuse what is no folder.

    Raises:
        FileNotFoundError: nothing is there, or a file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder, found none at {folder}")
