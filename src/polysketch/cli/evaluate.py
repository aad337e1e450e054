"""`polysketch evaluate MODEL`: how well a model predicts held-out text, answers tasks, and uses what is far away."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from polysketch.cli.plots import check_folder, check_plot

if TYPE_CHECKING:
    from polysketch.cli.evaluated_model import EvaluatedModel

__all__ = ["EvaluateFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """The model, and the text that it is measured on."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """folder of the training run, or of a model of transformers"""
    data: Path | None = None
    """folder of prepared text; default: the one the run was trained on"""
    split: Literal["train", "validation", "test"] = "test"
    """which part of the text"""
    context: int | None = None
    """tokens in a window; default: as in training"""
    checkpoint: str = "latest"
    """which checkpoint of the run: latest, or a name such as step-00000100"""
    batch_size: int = 8
    """windows read at a time; smaller needs less memory"""
    span: int = 2048
    """tokens of a window read at a time; smaller needs less memory"""
    max_tokens: int | None = None
    """predict only the first so many tokens; default: all"""
    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU where there is one"""
    seed: int = 1234
    """of what is drawn at random: examples before questions, hidden sentences, pairs"""
    without_prefix: bool = False
    """switch the sketched prefix off: what the local chunks manage alone"""
    plot: Path | None = None
    """write a plot to this file (.png, .pdf or .svg): of the loss by position or by context, of needles, of recall"""
    json: bool = False
    """print the figures as one JSON object on the last line"""
    out: Path | None = None
    """write the figures, with versions and settings, to this JSON file"""


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """Questions with known answers, by lm_eval, on files of this machine (--tasks)."""

    tasks: str | None = None
    """names with commas between: hellaswag, piqa, lambada, arc, arc_easy, arc_challenge, winogrande, openbookqa;
    physics or another task of BIG-bench, by name or as the path of its json file"""
    shots: str = "0"
    """numbers of examples before each question, with commas between, for instance 0,5"""
    task_data: Path | None = None
    """folder of the tasks' files; default: the folder eval of POLYSKETCH_DATA"""
    limit: int | None = None
    """score only the first so many questions of a task"""
    max_length: int | None = None
    """tokens that the model reads at most; longer inputs are cut on the left; default: 2048, or as the model states"""
    download: bool = False
    """let lm_eval fetch the data of a task that it knows and that is not among the files"""


@dataclass(frozen=True, kw_only=True)
class ReachFlags:
    """How far a model reaches back (--contexts, --needle, --recall)."""

    contexts: str | None = None
    """measure perplexity at these context lengths, with commas between, for instance 512,1024,2048"""
    needle: bool = False
    """hide a sentence in text and ask for it, at lengths and depths"""
    lengths: str = "256,512,1024,2048"
    """lengths of text for --needle, in tokens"""
    depths: str = "0,0.25,0.5,0.75,1"
    """where in the text the sentence is hidden, for --needle: 0 at the beginning, 1 at the end"""
    trials: int = 16
    """trials at every length and depth, for --needle, and sequences of every kind, for --recall"""
    recall: bool = False
    """recall of values by their keys, over numbers of pairs and gaps"""
    pairs: str = "4,16,64"
    """numbers of pairs, for --recall"""
    gaps: str = "0,512,2048"
    """positions between the pairs and the questions, for --recall"""


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(ReachFlags, TaskFlags, TextFlags):
    """Measure a model: a training run, or a folder of transformers (exported, converted or any other causal model).

    Without --tasks, --contexts, --needle or --recall: loss, perplexity, bits per byte and loss by position on held-out
    text. Every token but the first is predicted once, from those before it in its window of --context tokens. The
    context may be longer than the one used in training: memory does not grow with it.
    """


def run(flags: EvaluateFlags) -> int:
    """Evaluate as the flags say, print the figures, and return the exit status."""
    if not flags.download:  # before anything is imported that asks the Hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    measure = _measurement(flags)
    check_plot(flags.plot)
    check_folder(flags.out, "--out")
    figures = measure(_open(flags), flags)
    if flags.out is not None:
        report = {"figures": figures, "settings": _settings(flags), "versions": _versions()}
        flags.out.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print(f"figures: {flags.out}")
    if flags.json:
        print(json.dumps(figures, allow_nan=False))
    return 0


def _measurement(flags: EvaluateFlags) -> Callable[["EvaluatedModel", EvaluateFlags], dict[str, Any]]:
    """What was asked for, loaded when it is."""
    asked = {
        "--tasks": flags.tasks is not None,
        "--contexts": flags.contexts is not None,
        "--needle": flags.needle,
        "--recall": flags.recall,
    }
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise ValueError(f"expected one of {', '.join(asked)} at a time, found {' and '.join(chosen)}")
    if chosen == ["--tasks"]:
        if flags.plot is not None:
            raise ValueError("expected no --plot with --tasks, found one: figures of tasks are a table")
        from polysketch.cli.evaluation_tasks import measure_tasks

        return measure_tasks
    if chosen:
        from polysketch.cli import evaluation_reach

        return {
            "--contexts": evaluation_reach.measure_contexts,
            "--needle": evaluation_reach.measure_needle,
            "--recall": evaluation_reach.measure_recall,
        }[chosen[0]]
    from polysketch.cli.evaluation_loss import measure_loss

    return measure_loss


def _open(flags: EvaluateFlags) -> "EvaluatedModel":
    """The model of a run or of a folder of transformers."""
    from polysketch.cli.evaluated_model import EvaluatedModel, open_transformers
    from polysketch.integrations.transformers_folder import is_transformers_folder
    from polysketch.training import load_model
    from polysketch.training.environment import resolve_device

    device = resolve_device(flags.device)
    if is_transformers_folder(flags.run):
        return open_transformers(flags.run, device)
    model, description = load_model(flags.run, device=device, checkpoint=flags.checkpoint)
    return EvaluatedModel.of_run(flags.run, model, description)


def _settings(flags: EvaluateFlags) -> dict[str, Any]:
    """The flags, for a reader of the figures."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(flags).items()}


def _versions() -> dict[str, str]:
    """What the figures may depend on."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("polysketch", "transformers", "lm_eval", "datasets", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
