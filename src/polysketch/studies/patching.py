"""Perplexity and time of a trained softmax model against the number of its last layers that get another attention.

The experiment of HyperAttention's figure 3 (arXiv:2310.05869, section 4.1): a model is not trained again, its last l
layers are replaced, and l grows. Times are of the attention of all layers together, replaced or not, without
projections; and of the whole forward pass.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polysketch.attention import check_options
from polysketch.benchmarking.settings import check_positive
from polysketch.data import PreparedData
from polysketch.integrations.transformers_folder import read_model, tokens_of
from polysketch.plotting import finish, picture, whole_numbers
from polysketch.studies.pieces import in_pieces
from polysketch.studies.presentation import number
from polysketch.studies.rows import parsed
from polysketch.studies.study import Record, Study, Verdict
from polysketch.studies.task_study import nearby_options
from polysketch.training.environment import resolve_device, resolve_dtype


@dataclass(frozen=True)
class PatchingSettings:
    """One size of the study.

    Attributes:
        model: folder of a causal language model that transformers saved.
        data: folder of text prepared with the model's tokenizer, or a text file, for the tokenizer in the model's
            folder.
        split: which part of prepared text.
        layers: how many of the last layers to replace, one measurement each; from none to all of them when empty.
        context: tokens of a window, read at once, without a cache.
        windows: how many windows, spread over the text.
        nearby: tokens of chunks, windows and samples, for mechanisms that have them; 0 for their defaults.
        ignore_sliding_window: replace layers with a window by attention without one.
        dtype: of the weights; auto is bfloat16 on a GPU and float32 on a CPU.
    """

    model: str = ""
    data: str = ""
    split: str = "validation"
    layers: tuple[int, ...] = ()
    context: int = 32_768
    windows: int = 2
    nearby: int = 0
    ignore_sliding_window: bool = False
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_positive(context=self.context, windows=self.windows)


@dataclass
class _Stopwatch:
    """Seconds of all sections since the last `total`, on the device; nothing waits until then."""

    device: torch.device
    _sections: list[Callable[[], float]] = field(default_factory=list)

    @contextmanager
    def section(self, _layer: int) -> Iterator[None]:
        """Time what is inside."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            yield
            seconds = time.perf_counter() - started
            self._sections.append(lambda: seconds)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._sections.append(lambda: start.elapsed_time(end) / 1e3)

    def total(self) -> float:
        """Wait, add up, and begin anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, self._sections = sum(section() for section in self._sections), []
        return seconds


def spread_windows(tokens: np.ndarray, context: int, windows: int) -> Tensor:
    """(windows, context + 1) int64: the inputs and, one further, the targets; spread evenly over the tokens.

    Raises:
        ValueError: too few tokens for windows that do not overlap.
    """
    if len(tokens) < windows * (context + 1):
        raise ValueError(
            f"expected at least {windows * (context + 1):,} tokens for {windows} windows of {context:,}, found "
            f"{len(tokens):,}: choose a shorter context, fewer windows or more text"
        )
    starts = [number * (len(tokens) // windows) for number in range(windows)]
    return torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64))


class PatchingStudy(Study):
    """The last layers replaced, one more at a time, and nothing trained. Rows are mechanisms, with or without options.

    HyperAttention is exact up to its min_length, so that the context must be longer, or `nearby` shorter.
    """

    claim = "Half of the layers get HyperAttention without training, and perplexity rises by an eighth at most."
    paper = "ChatGLM3 at 32k: 5.6 becomes 6.3, attention 50 % faster; with all of its layers 12, and 2.3 times"
    rows = needs = ("hyper",)
    sizes = MappingProxyType(
        {
            "smoke": PatchingSettings(context=128, windows=1, nearby=4),
            "short": PatchingSettings(context=512, windows=8, nearby=64),
            "cpu": PatchingSettings(),
            "paper": PatchingSettings(windows=16),
        }
    )

    def check_row(self, row: str) -> None:
        """Any mechanism that is causal, with any of its options."""
        name, options = parsed(row)
        check_options(name, options)

    def depends_on(self, row: str, seed: int, settings: PatchingSettings) -> dict[str, Any]:
        """As the base class has it."""
        return {**dataclasses.asdict(settings), "attention": row, "options": _options(row, settings), "seed": seed}

    def make(self, row: str, seed: int, settings: PatchingSettings, folder: Path) -> dict[str, Any]:
        """Measure, a piece for each number of layers; the model is left as it was found.

        Raises:
            ValueError: no model or text was asked for, more layers than the model has, ids outside its vocabulary, or
                too few tokens.
        """
        if not settings.model or not settings.data:
            raise ValueError(
                "expected a model that transformers saved and a text, found none: give "
                """--set 'model="FOLDER"' 'data="FOLDER OR FILE"'"""
            )
        from polysketch.integrations import replacement  # needs transformers, which few studies do

        device = resolve_device("auto")
        model = read_model(Path(settings.model), dtype=resolve_dtype(settings.dtype, device), device=device)
        count = len(replacement.attention_layers(model))
        layers = settings.layers or tuple(range(count + 1))
        if min(layers) < 0 or max(layers) > count:
            raise ValueError(f"expected numbers of layers from 0 to {count}, which the model has, found {layers}")
        patched = _Patched(model, _windows_of(settings, model), row, seed, settings)
        pieces = {f"{number}-layers": partial(patched.measured, number) for number in sorted(set(layers))}
        try:
            return {"measurements": in_pieces(folder, self.depends_on(row, seed, settings), pieces)}
        finally:
            replacement.restore_attention(model)

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each number of layers; speed-ups are against none."""
        heading = ["mechanism", "layers", "perplexity", "loss", "attention s", "times as fast", "forward s"]
        return [*heading, "of forward"], [
            [record["row"], *_cells(one, record["measurements"][0])]
            for record in records
            for one in record["measurements"]
        ]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Perplexity, and times, against the number of layers."""
        with picture(folder / "layers.png", (11.0, 4.2), columns=2, dpi=120) as ((left, right),):
            for place, record in enumerate(records):
                _draw(left, right, record, f"C{place}")
            along = "layers replaced, the last first"
            finish(left, xlabel=along, ylabel="perplexity", title="perplexity")
            right.set_ylim(bottom=0)
            finish(right, xlabel=along, ylabel="seconds a window", title="time")
            whole_numbers(left)
            whole_numbers(right)

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By half of the layers, of the first record: the study's rows come before others."""
        if not records:
            return Verdict("nothing measured", None)
        rows = records[0]["measurements"]
        half = next((one for one in rows if one["layers"] == rows[-1]["layers"] // 2), None)
        if rows[0]["layers"] or half is None or not half["layers"]:
            return Verdict("not measured at half of the layers", None)
        ratio = half["perplexity"] / rows[0]["perplexity"]
        faster = rows[0]["attention_seconds"] / half["attention_seconds"]
        told = f"{rows[0]['perplexity']:.4g} becomes {half['perplexity']:.4g} with {half['layers']} of "
        return Verdict(f"{told}{rows[-1]['layers']} layers, attention {faster:.2f} times as fast", ratio <= 1.125)


def _cells(one: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    faster = first["attention_seconds"] / one["attention_seconds"] if first["layers"] == 0 else None
    return [
        str(one["layers"]),
        f"{one['perplexity']:.4g}",
        number(one["loss"], 4),
        f"{one['attention_seconds']:.4g}",
        number(faster, 2),
        f"{one['forward_seconds']:.4g}",
        f"{one['attention_seconds'] / one['forward_seconds']:.0%}",
    ]


def _draw(left: Any, right: Any, record: Record, colour: str) -> None:
    rows, row = record["measurements"], record["row"]
    layers = [one["layers"] for one in rows]
    left.plot(layers, [one["perplexity"] for one in rows], "o-", color=colour, label=row)
    right.plot(layers, [one["attention_seconds"] for one in rows], "o-", color=colour, label=f"{row}: attention")
    right.plot(layers, [one["forward_seconds"] for one in rows], "s--", color=colour, label=f"{row}: forward")


def _options(row: str, settings: PatchingSettings) -> dict[str, Any]:
    name, given = parsed(row)
    return {**nearby_options(name, settings.nearby), **given}


def _windows_of(settings: PatchingSettings, model: Any) -> Tensor:
    data = Path(settings.data)
    if data.is_dir():
        tokens = np.asarray(PreparedData.open(data).split(settings.split).tokens)
    else:
        tokens = tokens_of(data.read_text(encoding="utf-8"), Path(settings.model))
    windows, known = spread_windows(tokens, settings.context, settings.windows), model.config.vocab_size
    if windows.max() >= known:
        raise ValueError(
            f"the text has ids up to {int(windows.max())}, and the model a vocabulary of {known}: was it prepared with "
            "the model's tokenizer?"
        )
    return windows


@dataclass(frozen=True)
class _Patched:
    """A model whose last layers are replaced, and the windows that it reads."""

    model: Any
    windows: Tensor
    row: str
    seed: int
    settings: PatchingSettings

    def measured(self, layers: int) -> list[dict[str, Any]]:
        """With so many of the last layers replaced, each with weights that depend on seed and layer alone."""
        from polysketch.integrations import replacement
        from polysketch.integrations.language_model import HuggingFaceLM

        replacement.restore_attention(self.model)
        count, name = len(replacement.attention_layers(self.model)), parsed(self.row)[0]
        for layer in range(count - layers, count):
            torch.manual_seed(self.seed + layer)
            replacement.replace_attention(
                self.model,
                name,
                layers=[layer],
                sliding_window="ignore" if self.settings.ignore_sliding_window else "refuse",
                **_options(self.row, self.settings),
            )
        return [{"layers": layers, **_measure(HuggingFaceLM(self.model), self.windows)}]


@torch.inference_mode()
def _measure(model: Any, windows: Tensor) -> dict[str, Any]:
    from polysketch.integrations import replacement

    device = next(model.parameters()).device
    watch, whole = _Stopwatch(device), _Stopwatch(device)
    losses, attention, forward = [], [], []
    with replacement.around_attention(model.model, watch.section):
        model.hidden_states(windows[:1, :-1].to(device))  # warms up
        watch.total()
        for window in windows.to(device):
            with whole.section(0):
                hidden = model.hidden_states(window[None, :-1])
                losses.append(float(model.token_losses(hidden, window[None, 1:]).double().mean()))
            attention.append(watch.total())
            forward.append(whole.total())
    loss = fmean(losses)
    return {
        "perplexity": math.exp(loss),
        "loss": loss,
        "attention_seconds": median(attention),
        "forward_seconds": median(forward),
        "seconds_of_windows": {"attention": attention, "forward": forward},
    }


PATCHED_LAYERS = PatchingStudy()
