"""What a far field is worth: forms of attention, trained alike, and read far beyond their context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from polysketch.data import PreparedData
from polysketch.ops.arguments import check_at_least_one
from polysketch.studies.five_words import CONTROL, asked_at_depths
from polysketch.studies.held_out import held_out_windows, measures
from polysketch.studies.lengths import at_lengths
from polysketch.studies.presentation import Line, number, plot_lines, plot_seeds, spread
from polysketch.studies.study import Record, Study, Verdict
from polysketch.studies.texts import books, source_code
from polysketch.studies.trained import trained
from polysketch.training import TrainingConfig, load_model
from polysketch.training.environment import resolve_device

_CURVE_POINTS, _EVALUATIONS, _CHECKPOINTS = 200, 10, 20
_CODE: Literal["code"] = "code"
_LINEAR = "linear"
_BEHIND = 0.01  # nats: what a few seeds can tell
_JUDGED = "polysketch-every-2"


@dataclass(frozen=True)
class Form:
    """A row.

    Attributes:
        label: what tables and plots say.
        attention: name of the mechanism, or a pattern over the layers.
        options: of the mechanism; a pattern's by mechanism. The option that is `None` here takes the window.
        every: the mechanism stands in the last of each so many layers, windows in the others.
    """

    label: str
    attention: str | tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    every: int = 1

    @property
    def pattern(self) -> str | tuple[str, ...]:
        """The attention of the model's layers."""
        if self.every == 1:
            return self.attention
        return (*(self.every - 1) * (_WINDOWS,), str(self.attention))

    def attention_options(self, window: int) -> dict[str, Any]:
        """The options with the window filled in; plain JSON values."""
        return _filled(
            {_WINDOWS: _WINDOW, str(self.attention): self.options} if self.every > 1 else self.options, window
        )


def _filled(options: Mapping[str, Any], window: int) -> dict[str, Any]:
    return {
        name: _filled(value, window) if isinstance(value, dict) else window if value is None else value
        for name, value in options.items()
    }


_WINDOWS = "sliding-window"
_WINDOW = {"window": None}
_SUMS = "polysketch-window"
_SKETCHES = {**_WINDOW, "sketch_size": 32}
_CODES = {**_WINDOW, "sketch_size": 24}
_RANDOM = {**_WINDOW, "features": "random", "sketch_size": 32, "far_bias": -14.0}

FORMS = {
    "softmax": Form("softmax over all tokens", "softmax"),
    "window": Form("softmax in the window alone", _WINDOWS, _WINDOW),
    "paper": Form("the paper's: aligned chunks, one denominator", "polysketch-paper", {"local_chunk": None}),
    "paper-half": Form(
        "the paper's, networks of half the products", "polysketch-paper", {"local_chunk": None, "sketch_expansion": 4}
    ),
    "polysketch-24": Form("window + delta rule, 24 x 24", "polysketch", _CODES),
    "polysketch": Form("window + delta rule, 32 x 32", "polysketch", _SKETCHES),
    "polysketch-both": Form(
        "the same, sketches of rotated vectors too", "polysketch", {**_SKETCHES, "sketched": "both"}
    ),
    "polysketch-every-2": Form("window + delta rule in every second layer", "polysketch", _SKETCHES, every=2),
    "polysketch-every-2-64": Form("the same, 64 x 64", "polysketch", {**_WINDOW, "sketch_size": 64}, every=2),
    "polysketch-every-3": Form("window + delta rule in every third layer", "polysketch", _SKETCHES, every=3),
    "polysketch-every-4": Form("window + delta rule in every fourth layer", "polysketch", _SKETCHES, every=4),
    "softmax-every-4": Form("softmax over all tokens in every fourth layer", "softmax", every=4),
    "codes": Form("window + products of codes", _SUMS, _CODES),
    "codes-closed": Form("the same, far part closed at first", _SUMS, {**_CODES, "far_bias": -5.0}),
    "codes-decay": Form("the same, with decay", _SUMS, {**_CODES, "decay_gate": True}),
    "learned": Form("window + learned sketch", _SUMS, {**_WINDOW, "features": "learned", "sketch_size": 32}),
    "random": Form("window + random sketch", _SUMS, _RANDOM),
    "power": Form("symmetric power 2, no window", "symmetric-power"),
    "based": Form("based and windows in turn", ("based", _WINDOWS), {_WINDOWS: _WINDOW}),
    "mixture": Form(
        "three layers of window + delta rule, one of softmax",
        ("polysketch", "polysketch", "polysketch", "softmax"),
        {"polysketch": _WINDOW},
    ),
}
"""The rows. A pattern needs a number of layers that it divides. The presets have `polysketch-every-2`."""

TEXTS: Mapping[str, Callable[[str, Path, int | None], PreparedData]] = {
    _CODE: lambda tokenizer, place, files: source_code(tokenizer, place, files=files),
    "books": lambda tokenizer, place, files: books(tokenizer, place, per_split=files),
}
"""(tokenizer, place, files) -> text, by name."""

_NEWER = {"text": _CODE, "schedule": _LINEAR}
"""Settings that are newer than some records, which do not say them, and what these records have."""

LABELS = {**{name: form.label for name, form in FORMS.items()}, "memory": "window + sparse memory"}
"""What tables say of each row, and of one that is in records alone: the library had it up to commit d14371e."""


_COUNTS = ("layers", "context", "window", "batch_size", "steps", "evaluation_windows", "predicted", "stretches")


@dataclass(frozen=True)
class FormsSettings:
    """One size of the study.

    Attributes:
        tokenizer: specification of the tokenizer that is trained on the text.
        text: `code`, Python's standard library, or `books`, those of POLYSKETCH_DATA in their own splits.
        files: take only so many files of the standard library, or so many books of each split; None takes all.
        data: a prepared folder to read in place of that text.
        preset, layers: of the model.
        context: tokens of a training window.
        window: tokens with exact weights, in every form that has such a part.
        batch_size, steps, learning_rate, optimizer, schedule: of training, on windows of the text.
        projection_convolution, query_key_norm, head_gate: what stands around every mechanism. The presets have all
            three; most records have no gates, for they were made before.
        input_positions: whether sinusoidal positions are added to embedded tokens.
        validation_tokens: tokens of each evaluation during training.
        evaluation_windows: held-out windows whose losses are told apart.
        lengths, predicted, stretches: see `at_lengths`.
        needle_length, needle_depths, needle_trials: see `asked_at_depths`.
    """

    tokenizer: str = "bpe:1024"
    text: Literal["code", "books"] = _CODE
    files: int | None = None
    data: str | None = None
    preset: str = "tiny"
    layers: int = 4
    context: int = 1024
    window: int = 64
    batch_size: int = 4
    steps: int = 2500
    learning_rate: float = 1e-2  # for Muon; 3e-3 was far too low in trials
    optimizer: str = "muon"
    schedule: str = _LINEAR
    projection_convolution: int = 4
    query_key_norm: bool = True
    head_gate: bool = False
    input_positions: bool = False
    validation_tokens: int = 65_536
    evaluation_windows: int = 64
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768)
    predicted: int = 512
    stretches: int = 16
    needle_length: int = 8192
    needle_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    needle_trials: int = 32

    def __post_init__(self) -> None:
        if self.text not in TEXTS:
            raise ValueError(f"expected a text of {', '.join(TEXTS)}, found {self.text!r}")
        check_at_least_one(**{name: getattr(self, name) for name in _COUNTS})


class FormsStudy(Study):
    """Every form on the same text, with everything else equal.

    A record has the loss of held-out files, and apart that of tokens which end a pair that occurred only beyond two
    windows (far), within them (near) or never before (new); the loss at growing lengths; and what is known of a needle.
    """

    claim = (
        "For equal tokens polysketch, in every second layer as the presets have it, predicts a text within "
        f"{_BEHIND} nats of softmax over all tokens."
    )
    paper = "none, the question is our own"
    rows = tuple(FORMS)
    needs = ("softmax", _JUDGED)
    sizes: Mapping[str, FormsSettings] = {
        "smoke": FormsSettings(
            tokenizer="bytes",
            files=40,
            context=48,
            window=8,
            batch_size=2,
            steps=2,
            validation_tokens=256,
            evaluation_windows=3,
            lengths=(48, 192),
            predicted=16,
            stretches=2,
            needle_length=256,
            needle_depths=(0.0, 0.5),
            needle_trials=2,
        ),
        "quick": FormsSettings(
            context=512,
            window=32,
            batch_size=8,
            steps=600,
            evaluation_windows=128,
            lengths=(512, 1024, 2048, 4096, 8192, 16_384),
            needle_length=0,
        ),
        "cpu": FormsSettings(),
        "long": FormsSettings(  # for equal time: `--set steps` as each form's speed allows
            context=8192,
            window=256,
            batch_size=1,
            steps=195,
            evaluation_windows=8,
            lengths=(8192,),
            stretches=8,
            needle_length=0,
        ),
        "gpu": FormsSettings(
            tokenizer="bpe:16384",
            preset="gpt2-small",
            layers=8,
            context=8192,
            window=256,
            batch_size=8,
            steps=1600,  # 105 million tokens
            learning_rate=3e-3,
            validation_tokens=524_288,
            lengths=(8192, 16_384, 32_768, 65_536),
            needle_length=65_536,
        ),
    }

    def depends_on(self, row: str, seed: int, settings: FormsSettings) -> dict[str, Any]:
        """As the base class has it."""
        form = FORMS[row]
        options = form.attention_options(settings.window)
        told = dataclasses.asdict(settings)
        for name, before in _NEWER.items():
            if told[name] == before:
                del told[name]
        return {**told, "attention": form.pattern, "attention_options": options, "seed": seed}

    def make(self, row: str, seed: int, settings: FormsSettings, folder: Path) -> dict[str, Any]:
        """Train, and measure."""
        data = _text(settings, folder.parent)
        run = trained(_training(FORMS[row], seed, settings, data, folder / "run"))
        model, _ = load_model(folder / "run", device=resolve_device("auto"))
        lengths = at_lengths(model, data, settings.lengths, settings.predicted, settings.stretches, folder / "lengths")
        asked = asked_at_depths(model, data, settings.needle_length, settings.needle_depths, settings.needle_trials)
        windows = held_out_windows(data, settings.context, settings.evaluation_windows)
        return {
            "text": data.sha256,
            "parameters": model.num_parameters(),
            "seconds": run["seconds"],
            "tokens": run["tokens"],
            "validation": [[line["step"], line["loss"]] for line in run["validation"]],
            "lengths": lengths,
            "needle": asked,
            **measures(model, windows, settings.window),  # the last, for it removes what lies beyond the window
        }

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each form: means over seeds, with their standard deviation."""
        lengths = sorted({int(length) for one in records for length in one.get("lengths", {})})
        depths = list(dict.fromkeys(depth for one in records for depth in one.get("needle", {}) if depth != CONTROL))
        heading = ["form", "seeds", *_LOSSES.values(), "chunk start", "share", *(f"at {n:,}" for n in lengths)]
        heading += [f"words named, needle at {depth}, %" for depth in depths]
        return [*heading, "s"], [_row(label, found, lengths, depths) for label, found in _by_form(records).items()]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Validation loss by step; where measured, loss by position, by length, by distance, and a needle's gain."""
        forms = _by_form(records)
        each = [(label, one) for label, found in forms.items() for one in found]
        curves = [_by_step(label, one) for label, one in each]
        plot_lines(folder / "validation.png", curves, xlabel="step", ylabel="validation loss, nats a token")
        places = [_by_position(label, one) for label, one in each if "loss_by_position" in one]
        loss = "loss of held-out files, nats a token"
        plot_lines(folder / "loss-by-position.png", places, xlabel="position in the window", ylabel=loss)
        gains = [_by_depth(label, one) for label, one in each if one.get("needle")]
        gain = "loss of the words, less than without it (nats a token)"
        plot_lines(folder / "gain-by-depth.png", gains, xlabel="depth of the needle", ylabel=gain)
        _draw_lengths(forms, folder / "loss-by-length.png")
        _draw_distances(forms, folder / "loss-by-distance.png")

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By means over seeds; every row's is told."""
        rows = dict.fromkeys(one["row"] for one in records)
        losses = {row: mean(one["loss"] for one in records if one["row"] == row) for row in rows}
        ours = ", ".join(f"{row} {loss:.3f} nats" for row, loss in losses.items())
        if not losses.keys() >= set(self.needs):
            return Verdict(ours, None)
        return Verdict(ours, losses[_JUDGED] <= losses["softmax"] + _BEHIND)


FORMS_STUDY = FormsStudy()

_LOSSES = {"loss": "loss", "new": "new", "near": "near", "far": "far", "far_without": "far, far field removed"}
"""Of a record, and what its column is called."""


def _text(settings: FormsSettings, place: Path) -> PreparedData:
    if settings.data is not None:
        return PreparedData.open(settings.data)
    return TEXTS[settings.text](settings.tokenizer, place, settings.files)


def _training(form: Form, seed: int, settings: FormsSettings, data: PreparedData, out: Path) -> TrainingConfig:
    return TrainingConfig(
        data=data.folder,
        out=out,
        resume=True,
        preset=settings.preset,
        layers=settings.layers,
        attention=form.pattern,
        attention_options=form.attention_options(settings.window),
        projection_convolution=settings.projection_convolution,
        query_key_norm=settings.query_key_norm,
        head_gate=settings.head_gate,
        input_positions=settings.input_positions,
        context=settings.context,
        batch_size=settings.batch_size,
        pack="windows",
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        optimizer=settings.optimizer,  # type: ignore[arg-type]
        schedule=settings.schedule,  # type: ignore[arg-type]
        seed=seed,
        device="auto",
        log_every=max(1, settings.steps // _CURVE_POINTS),
        eval_every=max(1, settings.steps // _EVALUATIONS),
        eval_tokens=settings.validation_tokens,
        save_every=max(1, settings.steps // _CHECKPOINTS),
        tensorboard=False,
    )


def _by_form(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by the label of their form."""
    by_label: dict[str, list[Record]] = {}
    for one in records:
        by_label.setdefault(LABELS[one["row"]], []).append(one)
    return by_label


def _row(label: str, found: Sequence[Record], lengths: Sequence[int], depths: Sequence[str]) -> list[str]:
    shares = [share for one in found for heads in one.get("shares", {}).values() for share in heads]
    asked = [one.get("needle", {}) for one in found]
    return [
        label,
        str(len(found)),
        *(spread([one.get(name) for one in found]) for name in _LOSSES),
        spread([one["chunk_start"] for one in found]),
        f"{min(shares):.2f} to {max(shares):.2f}" if shares else "-",
        *(spread([_at(one, length) for one in found]) for length in lengths),
        *(spread([100 * one[depth]["words"] for one in asked if depth in one]) for depth in depths),
        number(mean(one["seconds"] for one in found), 0),
    ]


def _at(record: Record, length: int) -> float | None:
    return record.get("lengths", {}).get(str(length), {}).get("loss")


def _by_step(label: str, record: Record) -> Line:
    return Line(label, [step for step, _ in record["validation"]], [loss for _, loss in record["validation"]])


def _by_position(label: str, record: Record) -> Line:
    middles = [(first + end) / 2 for first, end in pairwise(record["position_edges"])]
    return Line(label, middles, record["loss_by_position"])


def _by_depth(label: str, record: Record) -> Line:
    """What is gained: the loss of the words without the needle less that with it."""
    figures = record["needle"]
    depths = [name for name in figures if name != CONTROL]
    gains = [figures[CONTROL]["loss"] - figures[name]["loss"] for name in depths]
    return Line(label, [float(name) for name in depths], gains)


def _draw_lengths(forms: Mapping[str, Sequence[Record]], path: Path) -> None:
    read = {label: [one for one in found if one.get("lengths")] for label, found in forms.items()}
    records = [one for found in read.values() for one in found]
    if not records:
        return
    lengths = sorted({int(length) for one in records for length in one["lengths"]})
    rows = {label: [[_at(one, n) for n in lengths] for one in found] for label, found in read.items() if found}
    settings = records[0]["settings"]
    xlabel = f"tokens of context (trained at {settings['context']:,})"
    ylabel = f"loss of the last {settings['predicted']:,} tokens (nats)"
    plot_seeds(path, rows, lengths, xlabel=xlabel, ylabel=ylabel)


def _draw_distances(forms: Mapping[str, Sequence[Record]], path: Path) -> None:
    read = {label: [one for one in found if any(one.get("loss_by_distance", ()))] for label, found in forms.items()}
    records = [one for found in read.values() for one in found]
    if not records:
        return
    ends = max((one["distances"] for one in records), key=len)
    rows = {label: [one["loss_by_distance"] for one in found] for label, found in read.items() if found}
    xlabel = "tokens since the pair that a token ends occurred last, at most"
    plot_seeds(path, rows, ends, xlabel=xlabel, ylabel="loss of these tokens (nats)")
