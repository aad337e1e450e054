"""`polysketch evaluate MODEL --contexts ... | --needle | --recall`: how far back a model reaches."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polysketch.cli.comma_separated import numbers
from polysketch.cli.evaluate.evaluated_model import EvaluatedModel
from polysketch.cli.evaluate.flags import EvaluateFlags
from polysketch.cli.evaluate.plots import plot_contexts, plot_grid
from polysketch.cli.evaluate.progress import share_done
from polysketch.evaluation import (
    ContextLosses,
    NeedleResult,
    RecallResult,
    losses_by_context,
    make_needles,
    needle_retrieval,
    recall_grid,
)

__all__ = ["measure_contexts", "measure_needle", "measure_recall"]

_LENGTHS = "256,512,1024,2048"


def measure_contexts(evaluated: EvaluatedModel, flags: EvaluateFlags) -> dict[str, Any]:
    """Perplexity against the length of the context: a table, a plot, the figures."""
    contexts = numbers(flags.contexts or "", "--contexts", least=1, kind=int)
    data = evaluated.open_data(flags.data)
    _prepare(evaluated, flags)
    result = losses_by_context(
        evaluated.model,
        data.split(flags.split).tokens,
        contexts,
        span=flags.span,
        batch_size=flags.batch_size,
        token_bytes=data.tokenizer.token_bytes(),
        max_tokens=flags.max_tokens,
        on_progress=share_done("tokens"),
    )
    evaluated.require_finite(max(result.loss))
    _print_contexts(result, flags, evaluated)
    if flags.plot is not None:
        plot_contexts(result, flags.plot, title=f"{flags.run.name}, {flags.split}", trained=evaluated.context_length)
    return _head(evaluated, flags) | {
        "split": flags.split,
        "contexts": result.contexts,
        "loss": result.loss,
        "perplexity": [value if math.isfinite(value) else None for value in result.perplexity],
        "bits_per_byte": result.bits_per_byte,
        "late_loss": result.late_loss,
        "num_tokens": result.num_tokens,
    }


def measure_needle(evaluated: EvaluatedModel, flags: EvaluateFlags) -> dict[str, Any]:
    """Needle retrieval over lengths and depths: a table, a heat map, the figures."""
    lengths = numbers(_LENGTHS if flags.lengths is None else flags.lengths, "--lengths", least=1, kind=int)
    depths = numbers(flags.depths, "--depths", least=0.0, kind=float)
    data = evaluated.open_data(flags.data)
    _prepare(evaluated, flags)
    result = needle_retrieval(
        evaluated.model,
        data.split(flags.split).tokens,
        make_needles(evaluated.encode),
        lengths=lengths,
        depths=depths,
        num_trials=flags.trials,
        batch_size=flags.batch_size,
        span=flags.span,
        seed=flags.seed,
        on_progress=share_done("places"),
    )
    _print_needle(result, evaluated)
    if flags.plot is not None:
        plot_grid(
            result.accuracy.T,
            flags.plot,
            title=f"{flags.run.name}: needles found (chance {result.chance:.3g})",
            rows=("depth of the needle", [f"{depth:.0%}" for depth in depths]),
            columns=("length of the text (tokens)", [f"{length:,}" for length in lengths]),
        )
    return _head(evaluated, flags) | _figures(result)


def measure_recall(evaluated: EvaluatedModel, flags: EvaluateFlags) -> dict[str, Any]:
    """Multi-query associative recall over numbers of pairs and gaps: a table, a heat map, the figures."""
    pairs = numbers(flags.pairs, "--pairs", least=1, kind=int)
    gaps = numbers(flags.gaps, "--gaps", least=0, kind=int)
    _prepare(evaluated, flags)
    batch_size = min(flags.batch_size, flags.trials)
    result = recall_grid(
        evaluated.model,
        pairs=pairs,
        gaps=gaps,
        num_batches=math.ceil(flags.trials / batch_size),
        batch_size=batch_size,
        seed=flags.seed,
        on_progress=share_done("places"),
    )
    _print_recall(result, evaluated)
    if flags.plot is not None:
        plot_grid(
            result.accuracy,
            flags.plot,
            title=f"{flags.run.name}: values recalled (chance {result.chance:.3g})",
            rows=("pairs", [f"{number:,}" for number in pairs]),
            columns=("positions between pairs and questions", [f"{gap:,}" for gap in gaps]),
        )
    return _head(evaluated, flags) | _figures(result)


def _prepare(evaluated: EvaluatedModel, flags: EvaluateFlags) -> None:
    """Check what all three share."""
    if min(flags.trials, flags.batch_size) < 1:
        raise ValueError(
            f"expected --trials and --batch-size of at least 1, found {flags.trials} and {flags.batch_size}"
        )
    if flags.without_prefix:
        evaluated.remove_prefix()


def _head(evaluated: EvaluatedModel, flags: EvaluateFlags) -> dict[str, Any]:
    """What all figures begin with."""
    return {"run": str(flags.run), "step": evaluated.step, "without_prefix": flags.without_prefix}


def _figures(result: NeedleResult | RecallResult) -> dict[str, Any]:
    """A result for a program."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(result).items()}


def _print_contexts(result: ContextLosses, flags: EvaluateFlags, evaluated: EvaluatedModel) -> None:
    """A row for every context."""
    print(f"{evaluated.title}, {flags.split}, {result.num_tokens:,} tokens")
    print("   context  perplexity    loss  bits per byte  late loss")
    rows = zip(result.contexts, result.perplexity, result.loss, result.bits_per_byte, result.late_loss, strict=True)
    for context, perplexity, loss, bits, late in rows:
        print(f"  {context:>8,}  {perplexity:>10.3f}  {loss:.4f}  {bits if bits else math.nan:>13.4f}  {late:>9.4f}")
    print("late loss: of tokens that see half of the context at least")


def _print_needle(result: NeedleResult, evaluated: EvaluatedModel) -> None:
    """Accuracy by length and depth, and over all."""
    print(f"{evaluated.title}: needles found, of {result.num_trials} at each place; chance {result.chance:.4f}")
    _print_grid("length", result.lengths, "depth", [f"{depth:.0%}" for depth in result.depths], result.accuracy)
    print(f"  all places: accuracy {result.accuracy.mean():.4f}, margin {result.margin.mean():.4f} nats, ", end="")
    print(f"named outright {result.exact.mean():.4f}")


def _print_recall(result: RecallResult, evaluated: EvaluatedModel) -> None:
    """Accuracy by pairs and gap."""
    print(f"{evaluated.title}: values recalled; chance {result.chance:.4f}")
    _print_grid("pairs", result.pairs, "gap", [f"{gap:,}" for gap in result.gaps], result.accuracy)


def _print_grid(row: str, rows: Sequence[int], column: str, columns: Sequence[str], values: np.ndarray) -> None:
    """A table of shares."""
    print(f"  {row:>8}  {column} " + "".join(f"{name:>9}" for name in columns))
    for name, line in zip(rows, values, strict=True):
        print(f"  {name:>8,}  {'':{len(column)}} " + "".join(f"{value:>9.4f}" for value in line))
