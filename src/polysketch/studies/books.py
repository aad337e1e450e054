"""Perplexity of books against context: mechanisms trained alike, at one context after the other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from polysketch import attention, models
from polysketch.data import PreparedData
from polysketch.evaluation import Evaluation, evaluate, loss_at_chunk_starts
from polysketch.ops.arguments import check_at_least_one
from polysketch.studies import kept
from polysketch.studies.equal_time import steps_in
from polysketch.studies.presentation import Line, number, plot_lines, plot_seeds
from polysketch.studies.rows import parsed
from polysketch.studies.study import Record, Study, Verdict
from polysketch.studies.task_study import nearby_options
from polysketch.studies.texts import books
from polysketch.studies.trained import trained
from polysketch.training import TrainingConfig, load_model
from polysketch.training.environment import resolve_device

_CURVE_POINTS, _EVALUATIONS, _CHECKPOINTS = 250, 12, 20
_SPAN = 2048
_TOKENS_AT_ONCE = 16_384
_BINS = 64
_STARTS, _FOLLOWING = 8, 24
_SMOOTHED = 15

_MORE_LAYERS = "more_layers"
"""The option of a row that is the model's: so many layers beyond those of the size."""

_PAPER, _DEEPER = "polysketch-paper", f"polysketch-paper+{_MORE_LAYERS}=1"
_BEHIND = 1.02  # times the perplexity of softmax: what table 8 has at 16,384 tokens


@dataclass(frozen=True)
class BooksSettings:
    """One size of the study.

    Attributes:
        tokenizer: specification of the tokenizer that is trained on the books.
        books_per_split: take only so many books of each split; None takes all.
        preset: size of the model.
        layers: its layers, if other than the preset's.
        contexts: tokens of a training window; a model is trained for each.
        beyond: a longer context to read every model at; 0 for none.
        tokens_per_step: tokens of a batch, whatever the context.
        nearby: tokens of chunks and windows with exact weights.
        steps, learning_rate: of training.
        minutes: of training at each context, in the place of `steps`: see `equal_time`. Rows are comparable where they
            were made on one machine that did nothing else.
        validation_tokens: tokens of each evaluation during training.
        test_tokens: tokens of the test split to predict; None for all.
    """

    tokenizer: str = "bpe:8192"
    books_per_split: int | None = None
    preset: str = "mini"
    layers: int | None = None
    contexts: tuple[int, ...] = (512, 2048)
    beyond: int = 16_384
    tokens_per_step: int = 4096
    nearby: int = 256
    steps: int = 500
    learning_rate: float = 2e-3
    minutes: float | None = None
    validation_tokens: int = 65_536
    test_tokens: int | None = 262_144

    def __post_init__(self) -> None:
        if not self.contexts:
            raise ValueError("contexts: expected at least one, found none")
        check_at_least_one(**{f"contexts: {context}": context for context in self.contexts})
        counts = ("tokens_per_step", "nearby", "steps", "validation_tokens")
        check_at_least_one(**{name: getattr(self, name) for name in counts})


_CONTEXTS = BooksSettings(
    tokenizer="bpe:1024",
    preset="tiny",
    layers=2,
    contexts=(512, 2048, 8192),
    beyond=0,
    tokens_per_step=8192,
    nearby=64,
    steps=200,
    validation_tokens=32_768,
    test_tokens=131_072,
)


class BooksStudy(Study):
    """A row is a mechanism, with options behind it: `polysketch-paper+prefix_gain=0.8`; `more_layers` is the model's.

    A record has, for every context of training, the curve, and the test text at that context and the one beyond, with
    the sketched prefix and without.
    """

    claim = (
        "With one layer more polysketch-paper has no higher perplexity than softmax at any context, and with as many "
        "layers at most 2 % more."
    )
    paper = "PG-19, 2k and 32k tokens: softmax 12.23 and 11.55, 13 layers 12.09 and 11.47, 12 layers (r = 64) 11.57"
    rows = (
        "softmax",
        "polynomial",
        _PAPER,
        _DEEPER,
        "polysketch-paper+prefix_gain=0.8",
        "polysketch-paper+learned=False",
        "local",
        "sliding-window",
        "performer",
        "hedgehog",
        "polysketch",
    )
    needs = ("softmax", _PAPER, _DEEPER)
    sizes: Mapping[str, BooksSettings] = {
        "smoke": BooksSettings(
            tokenizer="bpe:512",
            books_per_split=1,
            preset="tiny",
            layers=1,
            contexts=(64,),
            beyond=128,
            tokens_per_step=128,
            nearby=16,
            steps=2,
            validation_tokens=256,
            test_tokens=512,
        ),
        "cpu": BooksSettings(),
        # A quarter of an hour of one thread a row.
        "contexts": _CONTEXTS,
        # Half an hour of one quiet thread a row.
        "equal-time": dataclasses.replace(_CONTEXTS, minutes=10.0),
        "gpu": BooksSettings(
            preset="gpt2-small",
            contexts=(2048, 8192),
            tokens_per_step=65_536,
            nearby=1024,
            steps=150,
            learning_rate=7e-4,
        ),
        "paper": BooksSettings(
            tokenizer="sentencepiece:32000",
            preset="gpt2-small",
            contexts=(512, 1024, 2048, 4096, 8192, 16_384, 32_768),
            beyond=0,
            tokens_per_step=1_048_576,
            nearby=1024,
            steps=125_000,
            learning_rate=7e-4,
            test_tokens=None,
        ),
    }

    def check_row(self, row: str) -> None:
        """A causal mechanism with any of its options, and `more_layers`."""
        name, options = parsed(row)
        if name not in attention.MECHANISMS or not attention.mechanism_class(name).is_causal:
            raise ValueError(f"expected rows of {', '.join(self.rows)}, found {row!r}")
        attention.check_options(name, {key: value for key, value in options.items() if key != _MORE_LAYERS})

    def depends_on(self, row: str, seed: int, settings: BooksSettings) -> dict[str, Any]:
        """As the base class has it."""
        name, options, layers = _model(row, settings)
        told = {"attention": name, "attention_options": options, "layers": layers, "seed": seed}
        given = dataclasses.asdict(settings)
        del given["minutes" if settings.minutes is None else "steps"]  # records by steps say nothing of minutes
        return {**given, **told}

    def make(self, row: str, seed: int, settings: BooksSettings, folder: Path) -> dict[str, Any]:
        """Train and measure a model for every context."""
        data = books(settings.tokenizer, folder.parent, per_split=settings.books_per_split)
        found = {}
        for context in settings.contexts:
            place = folder / str(context)
            training = trained(_training(row, seed, settings, context, data.folder, place))
            found[str(context)] = {"training": training, "evaluations": _evaluations(settings, context, data, place)}
        parameters = load_model(folder / str(settings.contexts[0]) / "run")[0].num_parameters()
        return {"text": data.sha256, "parameters": parameters, "contexts": found}

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each record, columns by context."""
        contexts = _contexts(records)
        columns = [(context, name) for context in contexts for name in _evaluated(records, context)]
        heading = ["mechanism", "seed", "parameters, M", "tokens, M"]
        heading += [_called(context, name) for context, name in columns]
        heading += [f"{what}, at {int(contexts[-1]):,}" for what in ("bits/byte", "chunk starts, nats more", "share")]
        return heading, [_row(one, columns, contexts[-1]) for one in records]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Perplexity against context; training loss by tokens, and perplexity by position, at every context."""
        _draw_by_context(records, folder / "perplexity-by-context.png")
        for context in _contexts(records):
            there = [one for one in records if context in one["contexts"]]
            curves = [_curve(one["row"], one["contexts"][context]["training"]["curve"]) for one in there]
            ylabel = f"training loss (nats a token, mean of {_SMOOTHED} points)"
            plot_lines(folder / f"loss-by-tokens-{context}.png", curves, xlabel="million tokens", ylabel=ylabel)
            for read in sorted({name.partition("-")[0] for name in _evaluated(records, context)}, key=int):
                lines = [line for one in there for line in _positions(one, context, read)]
                path = folder / f"perplexity-by-position-{context}-read-at-{read}.png"
                xlabel = f"position in the context (trained at {int(context):,}); dashed: prefix removed"
                plot_lines(path, lines, xlabel=xlabel, ylabel="perplexity", yscale="log")

    def judge(self, records: Sequence[Record]) -> Verdict:
        """At every context, by the mean loss over seeds."""
        losses = {row: _losses(records, row) for row in ("softmax", _PAPER, _DEEPER)}
        told = "; ".join(
            f"{row} {', '.join(f'{math.exp(loss):.1f} at {int(context):,}' for context, loss in found.items())}"
            for row, found in losses.items()
            if found
        )
        softmax, paper, deeper = losses.values()
        if not (softmax and paper and deeper):
            return Verdict(told or f"perplexity of {records[0]['row']}", None)
        holds = all(
            deeper[context] <= loss and paper[context] <= loss + math.log(_BEHIND) for context, loss in softmax.items()
        )
        return Verdict(told, holds)


BOOKS = BooksStudy()


def _model(row: str, settings: BooksSettings) -> tuple[str, dict[str, Any], int]:
    """Mechanism, options and layers of a row."""
    name, given = parsed(row)
    layers = settings.layers or models.PRESETS[settings.preset]["num_layers"]
    more = given.pop(_MORE_LAYERS, 0)
    return name, {**nearby_options(name, settings.nearby), **given}, layers + more


def _training(row: str, seed: int, settings: BooksSettings, context: int, data: Path, place: Path) -> TrainingConfig:
    """The run in a folder, by steps or by minutes."""
    config = _of_steps(row, seed, settings, context, data, place / "run")
    if settings.minutes is None:
        return config
    steps = steps_in(settings.minutes, config, place)
    return _of_steps(row, seed, dataclasses.replace(settings, steps=steps), context, data, place / "run")


def _of_steps(row: str, seed: int, settings: BooksSettings, context: int, data: Path, out: Path) -> TrainingConfig:
    name, options, layers = _model(row, settings)
    return TrainingConfig(
        data=data,
        out=out,
        resume=True,
        preset=settings.preset,
        projection_convolution=0,
        query_key_norm=False,
        head_gate=False,
        input_positions=True,
        layers=layers,
        attention=name,
        attention_options=options,
        context=context,
        batch_size=max(1, settings.tokens_per_step // context),
        pack="windows",
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        seed=seed,
        device="auto",
        log_every=max(1, settings.steps // _CURVE_POINTS),
        eval_every=max(1, settings.steps // _EVALUATIONS),
        eval_tokens=settings.validation_tokens,
        save_every=max(1, settings.steps // _CHECKPOINTS),
        tensorboard=False,
    )


def _evaluations(settings: BooksSettings, context: int, data: PreparedData, place: Path) -> dict[str, Any]:
    """All evaluations of a model by name; each is kept when it is finished."""
    found = {}
    for read in dict.fromkeys([context, settings.beyond or context]):
        for without_prefix in (False, True):
            model, description = load_model(place / "run", device=resolve_device("auto"))
            if without_prefix:
                if not _has_prefix(model):
                    continue
                model.remove_prefix()
            name = f"{read}-without-prefix" if without_prefix else str(read)
            told = {"step": description.step, "tokens": settings.test_tokens, "chunk": settings.nearby}

            def make(model: Any = model, read: int = read) -> dict[str, Any]:
                """Losses of the test text, read at this context."""
                return _evaluate(model, data, read, settings)

            found[name] = kept.kept_or_made(place / f"{name}.json", told, make)
    return found


def _has_prefix(model: Any) -> bool:
    """Whether a layer has approximated weights beside exact ones."""
    return any(block.mechanism is not None and block.mechanism.has_prefix for block in model.blocks)


def _evaluate(model: models.TransformerLM, data: PreparedData, read: int, settings: BooksSettings) -> dict[str, Any]:
    started = time.perf_counter()
    result = evaluate(
        model,
        data.split("test").tokens,
        context_length=read,
        span=_SPAN,
        batch_size=max(1, _TOKENS_AT_ONCE // read),
        token_bytes=data.tokenizer.token_bytes(),
        max_tokens=settings.test_tokens,
    )
    seconds = round(time.perf_counter() - started, 1)
    return {**evaluation_record(result, settings.nearby), "seconds": seconds, "provenance": kept.provenance()}


def evaluation_record(result: Evaluation, chunk: int) -> dict[str, Any]:
    """The figures of an evaluation as JSON values.

    Args:
        result: of `evaluate`.
        chunk: local chunk of the mechanisms; the loss at its starts is measured for every row, softmax included, to
            be compared.
    """
    following = min(_FOLLOWING, chunk - chunk // 4)
    starts = loss_at_chunk_starts(result, chunk, num_starts=min(_STARTS, chunk // 4), num_following=following)
    edges, losses = _binned(result)
    return {
        "loss": result.loss,
        "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
        "bits_per_byte": result.bits_per_byte,
        "num_tokens": result.num_tokens,
        "num_bytes": result.num_bytes,
        "chunk_starts": dataclasses.asdict(starts),
        "position_edges": result.position_edges.tolist(),
        "loss_by_position": result.loss_by_position.tolist(),
        "bin_edges": edges.tolist(),
        "loss_by_bin": losses.tolist(),
    }


def _binned(result: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """Edges and mean losses of equal bins of positions: finer than the doubling ones where contexts are long."""
    positions = len(result.loss_at_position)
    edges = np.unique(np.linspace(0, positions, min(_BINS, positions) + 1).astype(np.int64))
    sums = np.add.reduceat(result.loss_at_position * result.count_at_position, edges[:-1])
    return edges, sums / np.add.reduceat(result.count_at_position, edges[:-1])


def _contexts(records: Sequence[Record]) -> list[str]:
    return sorted({context for one in records for context in one["contexts"]}, key=int)


def _evaluated(records: Sequence[Record], context: str) -> list[str]:
    """Names of the evaluations of models of a context, the context itself first."""
    names = {name for one in records for name in one["contexts"].get(context, {}).get("evaluations", {})}
    return sorted(names, key=lambda name: (int(name.partition("-")[0]), name))


def _called(context: str, evaluation: str) -> str:
    """The column of an evaluation."""
    read, _, without = evaluation.partition("-")
    at = f"at {int(read):,}" if read == context else f"of {int(context):,}, read at {int(read):,}"
    return f"{'prefix removed' if without else 'perplexity'} {at}"


def _row(one: Record, columns: Sequence[tuple[str, str]], longest: str) -> list[str]:
    found = one["contexts"]
    figures = [found.get(context, {}).get("evaluations", {}).get(name, {}) for context, name in columns]
    last = found.get(longest, {"evaluations": {}, "training": {"validation": [{}]}})
    whole = last["evaluations"].get(longest, {})
    tokens = dict.fromkeys(number(each["training"]["tokens"] / 1e6, 2) for each in found.values())
    return [
        one["row"],
        str(one["seed"]),
        number(one["parameters"] / 1e6, 2),
        "/".join(tokens),  # as many at every context, but for equal time
        *(number(each.get("perplexity"), 2) for each in figures),
        number(whole.get("bits_per_byte"), 4),
        number(whole.get("chunk_starts", {}).get("penalty"), 3),
        _shares(last["training"]["validation"][-1]),
    ]


def _shares(line: Record) -> str:
    """The mean share of the prefix in each layer's heads, layers apart by slashes."""
    layers = line.get("prefix_shares", {})
    return "/".join(f"{mean(heads):.2f}" for heads in layers.values()) or "-"


def _losses(records: Sequence[Record], row: str) -> dict[str, float]:
    """By context of training, the loss at that context."""
    found = [one["contexts"] for one in records if one["row"] == row]
    contexts = dict.fromkeys(context for one in found for context in one)
    return {
        context: mean(one[context]["evaluations"][context]["loss"] for one in found if context in one)
        for context in contexts
    }


def _draw_by_context(records: Sequence[Record], path: Path) -> None:
    """Perplexity of every row at the contexts of training, where there are several."""
    contexts = _contexts(records)
    rows: dict[str, list[list[float | None]]] = {}
    for one in records:
        found = ((one["contexts"].get(context, {}).get("evaluations", {}).get(context)) for context in contexts)
        rows.setdefault(one["row"], []).append([_exp(each["loss"]) if each else None for each in found])
    if len(contexts) > 1:
        xlabel = "context of training and reading, tokens"
        plot_seeds(path, rows, [int(context) for context in contexts], xlabel=xlabel, ylabel="perplexity")


def _curve(label: str, curve: Mapping[str, Sequence[float]]) -> Line:
    losses = curve["loss"]
    smooth = [mean(losses[max(0, end - _SMOOTHED) : end]) for end in range(1, len(losses) + 1)]
    return Line(label, [tokens / 1e6 for tokens in curve["tokens"]], smooth)


def _positions(one: Record, context: str, read: str) -> Iterator[Line]:
    evaluations = one["contexts"][context]["evaluations"]
    for name, dashed in ((read, False), (f"{read}-without-prefix", True)):
        if name in evaluations:
            middles = [(first + end) / 2 for first, end in pairwise(evaluations[name]["bin_edges"])]
            yield Line(one["row"], middles, [_exp(loss) for loss in evaluations[name]["loss_by_bin"]], dashed)


def _exp(loss: float | None) -> float:
    return math.nan if loss is None or loss > 700 else math.exp(loss)
