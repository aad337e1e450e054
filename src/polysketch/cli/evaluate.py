"""`polysketch evaluate RUN`: how well a trained model predicts held-out text, and how that depends on position."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from polysketch.cli.plots import check_plot
from polysketch.data import PreparedData, require_same_tokenizer
from polysketch.evaluation import Evaluation, evaluate
from polysketch.training import RunDescription, load_model
from polysketch.training.environment import resolve_device

__all__ = ["EvaluateFlags", "run"]


@dataclass(frozen=True)
class EvaluateFlags:
    """Measure loss, perplexity, bits per byte and loss by position of a trained model on held-out text.

    Every token but the first is predicted once, from those before it in its window of --context tokens. The context
    may be longer than the one used in training: memory does not grow with it.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """folder of the training run"""
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
    without_prefix: bool = False
    """switch the sketched prefix off: what the local chunks manage alone"""
    plot: Path | None = None
    """write a plot of the loss by position to this file (.png, .pdf or .svg)"""
    json: bool = False
    """print the figures as one JSON object on the last line"""


def run(flags: EvaluateFlags) -> int:
    """Evaluate as the flags say, print the figures, and return the exit status."""
    model, description = load_model(flags.run, device=resolve_device(flags.device), checkpoint=flags.checkpoint)
    data = _open_data(flags, description)
    require_same_tokenizer(
        description.tokenizer, data.tokenizer, owner=f"the run {flags.run}", other=f"the data folder {data.folder}"
    )
    check_plot(flags.plot)
    if flags.without_prefix:
        model.remove_prefix()
    result = evaluate(
        model,
        data.split(flags.split).tokens,
        context_length=description.context_length if flags.context is None else flags.context,
        span=flags.span,
        batch_size=flags.batch_size,
        token_bytes=data.tokenizer.token_bytes(),
        max_tokens=flags.max_tokens,
        on_progress=_show_progress if sys.stderr.isatty() else None,
    )
    if not math.isfinite(result.loss):
        raise ValueError(f"expected a finite loss, found {result.loss}: the weights of {flags.run} are probably bad")
    _print_table(result, flags, description)
    if flags.plot is not None:
        plot_loss_by_position(result, flags.plot, title=f"{flags.run.name}, {flags.split}")
    if flags.json:
        print(json.dumps(_as_json(result, flags, description)))
    return 0


def _open_data(flags: EvaluateFlags, description: RunDescription) -> PreparedData:
    """Open the data that was asked for, or that of the run, which may have moved since."""
    if flags.data is None and not description.data.exists():
        raise FileNotFoundError(
            f"expected the data of the run {flags.run} in {description.data}, found nothing there: "
            "if the folder was moved, say where it is with --data"
        )
    return PreparedData.open(description.data if flags.data is None else flags.data)


def plot_loss_by_position(result: Evaluation, file: Path, *, title: str) -> None:
    """Write a plot of the mean loss of every bucket against the position in the context, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(result.loss_by_position, result.position_edges, baseline=None, linewidth=2)
    axes.set_xscale("symlog", base=2, linthresh=max(1, int(result.position_edges[1])))
    axes.set_xlim(0, int(result.position_edges[-1]))
    axes.set_xticks(result.position_edges, [f"{edge:,}" for edge in result.position_edges.tolist()], rotation=45)
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    print(f"plot: {file}")


def _print_table(result: Evaluation, flags: EvaluateFlags, description: RunDescription) -> None:
    """Print the figures for a person."""
    ablation = ", without the sketched prefix" if flags.without_prefix else ""
    print(f"{flags.run} at step {description.step}, {flags.split}, context {result.context_length}{ablation}")
    print(f"  tokens          {result.num_tokens:>12,}")
    print(f"  loss            {result.loss:>12.4f} nats per token")
    print(f"  perplexity      {result.perplexity:>12.3f}")
    if result.bits_per_byte is not None:
        print(f"  bits per byte   {result.bits_per_byte:>12.4f}   ({result.num_bytes:,} bytes)")
    print("  loss by position")
    edges = result.position_edges.tolist()
    for first, end, loss in zip(edges[:-1], edges[1:], result.loss_by_position, strict=True):
        print(f"    {first:>8,} - {end - 1:<10,}{loss:>8.4f}")


def _as_json(result: Evaluation, flags: EvaluateFlags, description: RunDescription) -> dict[str, Any]:
    """Return the figures for a program."""
    return {
        "run": str(flags.run),
        "step": description.step,
        "split": flags.split,
        "context_length": result.context_length,
        "without_prefix": flags.without_prefix,
        "loss": result.loss,
        "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
        "bits_per_byte": result.bits_per_byte,
        "num_tokens": result.num_tokens,
        "num_bytes": result.num_bytes,
        "position_edges": result.position_edges.tolist(),
        "loss_by_position": result.loss_by_position.tolist(),
    }


def _show_progress(done: int, total: int) -> None:
    """Overwrite one line on the terminal with the share that is done."""
    print(f"\r{100 * done / total:5.1f} %", end="\r" if done == total else "", file=sys.stderr, flush=True)
