"""The task of a run that answers questions, opened again to be measured on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.data import PreparedData
from polysketch.tasks import Task, is_task, open_task
from polysketch.tasks.masked import Inputs, MaskedTokens, TaskInputs, TextInputs
from polysketch.training.loading import RunDescription
from polysketch.training.run_folder import find_run


def learned_task(run: RunDescription, data: Path | None = None) -> Task:
    """What a run learned: a task, or to find hidden tokens.

    Args:
        run: from `load_answering_model`.
        data: a folder to ask about, in place of the run's own.

    Raises:
        FileNotFoundError: nothing where it is looked for.
        ValueError: something else there, or ids that stand for something else than the run's.
    """
    saved, _ = find_run(run.folder)
    options, folder = saved["training"], run.data if data is None else data
    if options.get("objective", "auto") != "masked":
        task: Task = open_task(folder)
    else:
        task = MaskedTokens(_inputs(folder, run, options), options["mask_share"], options["seed"])
    known = saved["data"].get("alphabet", "")
    if known and task.alphabet and known != task.alphabet:
        raise ValueError(f"--data: expected ids that stand for what the run learned, found others in {folder}")
    return task


def _inputs(folder: Path, run: RunDescription, options: Mapping[str, Any]) -> Inputs:
    if is_task(folder):
        return TaskInputs(open_task(folder))
    return TextInputs(PreparedData.open(folder, run.tokenizer), options["context"], options["seed"])
