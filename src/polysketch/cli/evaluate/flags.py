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
    """Folder of the training run, or of a model of transformers."""
    data: Path | None = None
    """Folder of prepared text, or token files of Megatron-LM, nanoGPT or llm.c made with the model's tokenizer.
    Default: what the run was trained on."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the text."""
    context: int | None = None
    """Tokens in a window. Default: as in training."""
    checkpoint: str = "latest"
    """Which checkpoint of the run: latest, best (the least validation loss), or a name such as
    step-00000100."""
    batch_size: int = 8
    """Windows read at a time. Fewer need less memory."""
    span: int = 2048
    """Tokens of a window read at a time. Fewer need less memory."""
    max_tokens: int | None = None
    """Predict only so many tokens, from the beginning. Default: all."""
    device: str = "auto"
    """Where to compute: cpu, cuda, ...; auto takes a GPU if there is one."""
    seed: int = 1234
    """Seed of what is drawn at random: examples before questions, hidden sentences, pairs."""
    without_prefix: bool = False
    """Switch the sketched prefix off. This measures what the local chunks manage alone."""
    plot: Path | None = None
    """Write a plot to this file (.png, .pdf or .svg): loss by position or by context, needles, recall."""
    json: bool = False
    """Print the figures as one JSON object on the last line."""
    out: Path | None = None
    """Write the figures, with versions and settings, to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """Questions with known answers, by lm_eval, on files of this machine (--tasks)."""

    tasks: str | None = None
    """Names with commas between: hellaswag, piqa, lambada, arc, arc_easy, arc_challenge, winogrande, openbookqa, boolq,
    copa, wsc; a .jsonl file of your own, one {"question": ..., "choices": [...], "answer": 0} a line; physics or
    another task of BIG-bench. The last two by name, or as a path. Of RULER ruler_vt and ruler_fwe, which need no
    file."""
    shots: str = "0"
    """Numbers of examples before each question, with commas between, for instance 0,5."""
    task_data: Path | None = None
    """Folder of the tasks' files. Default: the folder eval of POLYSKETCH_DATA."""
    limit: int | None = None
    """Score only so many questions of a task, from the first on. Of RULER: so many at each length."""
    max_length: int | None = None
    """Most tokens that the model reads. Longer inputs are cut on the left. Default: 2048 or what RULER's
    texts need, or as the model states."""
    download: bool = False
    """Let lm_eval fetch the data of a task that it knows and that is not among the files."""


@dataclass(frozen=True, kw_only=True)
class ReachFlags:
    """How far a model reaches back (--contexts, --needle, --recall)."""

    contexts: str | None = None
    """Measure perplexity at these context lengths, with commas between, for instance 512,1024,2048."""
    needle: bool = False
    """Hide a sentence in text and ask for it, at lengths and depths."""
    lengths: str | None = None
    """Lengths of the text in tokens. Default: 256,512,1024,2048 for --needle, 4096 for the tasks of RULER."""
    depths: str = "0,0.25,0.5,0.75,1"
    """Where the sentence is hidden, for --needle: 0 at the beginning of the text, 1 at the end."""
    trials: int = 16
    """Trials at every length and depth, for --needle. Sequences of every kind, for --recall."""
    recall: bool = False
    """Ask for values by their keys, over numbers of pairs and gaps."""
    pairs: str = "4,16,64"
    """Numbers of pairs, for --recall."""
    gaps: str = "0,512,2048"
    """Positions between the pairs and the questions, for --recall."""


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(ReachFlags, TaskFlags, TextFlags):
    """Measure a model: a training run, or a folder of transformers (exported, converted or any other causal model).

    Without --tasks, --contexts, --needle or --recall it measures loss, perplexity, bits per byte and loss by position,
    on held-out text. Every token but the first is predicted once, from those before it in its window of --context
    tokens. The context may be longer than the one used in training. Memory does not grow with it. Of a run that learned
    a task it measures how many of the task's questions the model answers; --data may be the same task at other sizes.

    Examples:
      polysketch evaluate runs/books
      polysketch evaluate runs/books --contexts 512,2048,8192 --plot contexts.png
      polysketch evaluate runs/books --recall --pairs 4,16
    """
