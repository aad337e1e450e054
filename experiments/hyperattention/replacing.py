"""A trained softmax model whose last layers are given another attention: perplexity and time against their number.

The experiment of HyperAttention's figure 3 (arXiv:2310.05869, section 4.1): a model is not trained again, its last l
layers are replaced, and l grows. Times are of the attention of all layers together, replaced or not, without
projections; and of the whole forward pass.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polysketch.integrations import replacement
from polysketch.integrations.language_model import HuggingFaceLM


@dataclass(frozen=True)
class PatchingSettings:
    """What is replaced by what, and what is read.

    Attributes:
        attention, attention_options: the mechanism.
        layers: how many of the last layers to replace, one row each, growing.
        context: tokens of a window, read at once, without a cache.
        windows: how many windows, spread over the text.
        ignore_sliding_window: replace layers with a window by attention without one.
        seed: of mechanisms with random weights; a layer has the same ones in every row.
    """

    attention: str
    attention_options: Mapping[str, Any]
    layers: tuple[int, ...]
    context: int
    windows: int
    ignore_sliding_window: bool = False
    seed: int = 0


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


def measure_patching(
    model: Any,
    tokens: np.ndarray,
    settings: PatchingSettings,
    *,
    done: Sequence[Mapping[str, Any]] = (),
    on_row: Callable[[dict[str, Any]], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Replace more and more of the last layers, and measure; the model is left as it was found.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        tokens: (tokens,) ids of the model's vocabulary.
        settings: what to replace and to read.
        done: rows of an earlier call with the same settings, which are not measured again.
        on_row: is given every row as soon as it is measured.
        progress: is told what is being done.

    Returns:
        A row for each of `settings.layers`, growing: layers, perplexity, loss (nats), attention_seconds and
        forward_seconds (medians over windows), and the seconds of each window.

    Raises:
        ValueError: more layers than the model has, ids outside its vocabulary, or too few tokens.
    """
    count = len(replacement.attention_layers(model))
    if not settings.layers or min(settings.layers) < 0 or max(settings.layers) > count:
        raise ValueError(f"expected numbers of layers from 0 to {count}, which the model has, got {settings.layers}")
    windows = spread_windows(tokens, settings.context, settings.windows)
    language_model = HuggingFaceLM(model)
    if windows.max() >= language_model.config.vocab_size:
        raise ValueError(
            f"the text has ids up to {int(windows.max())}, and the model a vocabulary of "
            f"{language_model.config.vocab_size}: was it prepared with the model's tokenizer?"
        )
    rows = {row["layers"]: dict(row) for row in done}
    try:
        for layers in sorted(set(settings.layers)):
            if layers in rows:
                continue
            _replace_last(model, layers, count, settings)
            rows[layers] = {"layers": layers, **_measure(language_model, windows, layers, progress)}
            on_row(rows[layers])
    finally:
        replacement.restore_attention(model)
    return [rows[layers] for layers in sorted(set(settings.layers))]


def _replace_last(model: Any, layers: int, count: int, settings: PatchingSettings) -> None:
    """Replace the last `layers`, each with weights that depend on the seed and on the layer alone."""
    for layer in range(count - layers, count):
        torch.manual_seed(settings.seed + layer)
        replacement.replace_attention(
            model,
            settings.attention,
            layers=[layer],
            sliding_window="ignore" if settings.ignore_sliding_window else "refuse",
            **settings.attention_options,
        )


@torch.inference_mode()
def _measure(model: HuggingFaceLM, windows: Tensor, layers: int, progress: Callable[[str], None]) -> dict[str, Any]:
    device = next(model.parameters()).device
    watch, whole = _Stopwatch(device), _Stopwatch(device)
    losses, attention, forward = [], [], []
    with replacement.around_attention(model.model, watch.section):
        model.hidden_states(windows[:1, :-1].to(device))  # warms up
        watch.total()
        for number, window in enumerate(windows.to(device)):
            with whole.section(layers):
                hidden = model.hidden_states(window[None, :-1])
                losses.append(float(model.token_losses(hidden, window[None, 1:]).double().mean()))
            attention.append(watch.total())
            forward.append(whole.total())
            progress(f"{layers} layers, window {number + 1} of {len(windows)}: loss {losses[-1]:.4f}")
    loss = fmean(losses)
    return {
        "perplexity": math.exp(loss),
        "loss": loss,
        "attention_seconds": median(attention),
        "forward_seconds": median(forward),
        "seconds_of_windows": {"attention": attention, "forward": forward},
    }
