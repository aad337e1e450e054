"""The beginning of a training process: may it use the folder, and is it a new run or one to go on with?"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polysketch.models import ModelConfig
from polysketch.storage import disk
from polysketch.training.checkpoint import (
    checkpoint_step,
    delete_leftovers,
    find_checkpoint,
    list_checkpoints,
    set_aside_after,
)
from polysketch.training.metrics import MetricsFile
from polysketch.training.plan import Plan
from polysketch.training.resume import check_data, check_options, environment_changes
from polysketch.training.run_folder import RunFolder

Say = Callable[[str], None]


def find_start(run: RunFolder, plan: Plan, say: Say) -> Path | None:
    """Where the run in the locked folder `run` starts: a checkpoint, or None for its beginning. Writes nothing.

    Args:
        run: the run folder, locked by this process.
        plan: the resolved options.
        say: gets a line for everything the user should know.

    Raises:
        ValueError: the folder holds a run and `resume` was not asked for, or other files; or an option changed that
            the result depends on.
        FileNotFoundError: the checkpoint asked for is not there.
    """
    if not run.has_run():
        _refuse_foreign(run)
        return None
    if not plan.config.resume:
        raise ValueError(
            f"{run.path} already holds a run: give --resume to go on with it, or another --out to start a new one"
        )
    _check_unchanged(run.read_config(), plan.to_dict(), say)
    if not list_checkpoints(run.checkpoints) and plan.config.checkpoint == "latest":
        return None  # killed before the first checkpoint was complete
    return find_checkpoint(run.checkpoints, plan.config.checkpoint)


def _refuse_foreign(run: RunFolder) -> None:
    foreign = run.foreign_files()
    if foreign:
        raise ValueError(
            f"{run.path}: expected an empty folder or a run folder, found {foreign[0]!r} and no config.json: "
            "give another --out"
        )


def _check_unchanged(saved: dict[str, Any], new: dict[str, Any], say: Say) -> None:
    check_data(saved["data"], new["data"])
    notes = check_options(saved["training"], new["training"])
    notes += environment_changes(saved["environment"], new["environment"])
    if saved["resolved"]["dtype"] != new["resolved"]["dtype"]:
        raise ValueError(
            f"--dtype: the run computes in {saved['resolved']['dtype']}, this machine would in "
            f"{new['resolved']['dtype']}; give --dtype as in the run"
        )
    if ModelConfig.from_dict(saved["model"]).to_dict() != new["model"]:  # options added since then have their defaults
        raise ValueError("the preset or the defaults of the mechanism changed since the run started: start a new run")
    for note in notes:
        say(f"note: {note}")


def lay_out(run: RunFolder, plan: Plan, start: Path | None, say: Say) -> None:
    """Bring the folder to the state of `start`: configuration, tokenizer, metrics up to there, no later checkpoints.

    Every part may be interrupted and is done again by the next process: config.json comes first, so that the folder
    is recognised.
    """
    _write_config(run, plan)
    _copy_tokenizer(run, plan)
    if not run.checkpoints.is_dir():
        disk.make_folder(run.checkpoints)
        disk.sync(run.path)
    delete_leftovers(run.checkpoints)
    step = -1 if start is None else checkpoint_step(start)
    for path in set_aside_after(run.checkpoints, step) if start is not None else []:
        say(f"note: later checkpoint set aside as {path}")
    MetricsFile(run.metrics).drop_after(step)


def _write_config(run: RunFolder, plan: Plan) -> None:
    """Write what changed (only what `find_start` allows); the environment stays that of the run's start."""
    config = plan.to_dict()
    if run.has_run():
        saved = run.read_config()
        config["environment"] = saved["environment"]
        if config == saved:
            return
    run.write_config(config)


def _copy_tokenizer(run: RunFolder, plan: Plan) -> None:
    """Copy the description and the tokenizer of the data, so that the run can be used without the data."""
    run.tokenizer.mkdir(exist_ok=True)
    names = ["description.json", plan.data.description.tokenizer.file]
    for name in filter(None, names):
        shutil.copyfile(plan.config.data / name, run.tokenizer / name)
