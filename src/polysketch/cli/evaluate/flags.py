"""The flags of `polysketch evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["EvaluateFlags"]


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
