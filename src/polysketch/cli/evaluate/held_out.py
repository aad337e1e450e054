"""`polysketch evaluate MODEL` alone: loss, perplexity, bits per byte and loss by position on held-out text."""

import math
from typing import Any

from polysketch.cli.evaluate.evaluated_model import EvaluatedModel
from polysketch.cli.evaluate.flags import EvaluateFlags
from polysketch.cli.evaluate.plots import plot_loss_by_position
from polysketch.cli.evaluate.progress import share_done
from polysketch.cli.next_command import next_command
from polysketch.evaluation import Evaluation, evaluate

__all__ = ["measure_loss"]


def measure_loss(evaluated: EvaluatedModel, flags: EvaluateFlags) -> dict[str, Any]:
    """Measure, print a table, plot where that was asked for, and return the figures.

    Raises:
        ValueError: a context that has to be given and is not, or a loss that is not finite.
    """
    data = evaluated.open_data(flags.data)
    if flags.without_prefix:
        evaluated.remove_prefix()
    context = evaluated.context_length if flags.context is None else flags.context
    if context is None:
        raise ValueError(f"expected --context for {evaluated.path}, which does not say what it was trained with")
    result = evaluate(
        evaluated.model,
        data.split(flags.split).tokens,
        context_length=context,
        span=flags.span,
        batch_size=flags.batch_size,
        token_bytes=data.tokenizer.token_bytes(),
        max_tokens=flags.max_tokens,
        on_progress=share_done("tokens"),
    )
    evaluated.require_finite(result.loss)
    _print_table(result, flags, evaluated)
    if flags.plot is not None:
        plot_loss_by_position(result, flags.plot, title=f"{flags.run.name}, {flags.split}")
    checkpoint = () if flags.checkpoint == "latest" else ("--checkpoint", flags.checkpoint)
    print(next_command("generate", evaluated.path, *checkpoint, "--interactive"))
    return _as_json(result, flags, evaluated)


def _print_table(result: Evaluation, flags: EvaluateFlags, evaluated: EvaluatedModel) -> None:
    """Print the figures for a person."""
    ablation = ", without the sketched prefix" if flags.without_prefix else ""
    print(f"{evaluated.title}, {flags.split}, context {result.context_length}{ablation}")
    print(f"  tokens          {result.num_tokens:>12,}")
    print(f"  loss            {result.loss:>12.4f} nats per token")
    print(f"  perplexity      {result.perplexity:>12.3f}")
    if result.bits_per_byte is not None:
        print(f"  bits per byte   {result.bits_per_byte:>12.4f}   ({result.num_bytes:,} bytes)")
    print("  loss by position")
    edges = result.position_edges.tolist()
    for first, end, loss in zip(edges[:-1], edges[1:], result.loss_by_position, strict=True):
        print(f"    {first:>8,} - {end - 1:<10,}{loss:>8.4f}")


def _as_json(result: Evaluation, flags: EvaluateFlags, evaluated: EvaluatedModel) -> dict[str, Any]:
    """Return the figures for a program."""
    return {
        "run": str(flags.run),
        "step": evaluated.step,
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
