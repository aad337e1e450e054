"""The task of a run that answers questions, opened again to be measured on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.data import PreparedData
from polysketch.tasks import Task, is_task, open_task, task_digest
from polysketch.tasks.description import read_task_description
from polysketch.tasks.masked import Inputs, MaskedTokens, TaskInputs, TextInputs
from polysketch.training.loading import RunDescription
from polysketch.training.run_folder import RunFolder, find_run


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


def task_options(run: RunDescription) -> dict[str, Any]:
    """What the task of a run says of itself: from the run, or, of runs that do not keep it, from the task where it is.

    Nothing where neither is there, or the task is another one by now.
    """
    folder = RunFolder(run.folder)
    if is_task(folder.task):
        return read_task_description(folder.task)["options"]
    sha256 = folder.read_config()["data"]["description_sha256"]
    same = is_task(run.data) and task_digest(run.data) == sha256
    return read_task_description(run.data)["options"] if same else {}


def _inputs(folder: Path, run: RunDescription, options: Mapping[str, Any]) -> Inputs:
    if is_task(folder):
        return TaskInputs(open_task(folder))
    return TextInputs(PreparedData.open(folder, run.tokenizer), options["context"], options["seed"])
