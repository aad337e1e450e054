"""Time per generated token over a whole local chunk, early and late in a context, in alternating steps."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu.settings import FULL, Bench, Figure, Outcome
from polysketch.benchmarking import floors
from polysketch.models import ModelState, TransformerLM, preset

_PREFILL_SPAN = 2_048
_WITHIN = 0.10
_MOST_FOLD = 5.0


@dataclass
class _Place:
    """A position: the state before its chunk, and the seconds of every token of every round."""

    position: int
    state: ModelState
    token: Tensor
    rounds: list[list[float]]

    @property
    def median(self) -> float:
        return statistics.median(self._all())

    @property
    def percentile_99(self) -> float:
        """The median over rounds of each round's 99th percentile: one hiccup of the machine is not the code's."""
        return statistics.median(_percentile_99(seconds) for seconds in self.rounds)

    @property
    def fold(self) -> float:
        """The chunk's last token, whose step folds the chunk into the sums: median over rounds."""
        return statistics.median(seconds[-1] for seconds in self.rounds)

    def _all(self) -> list[float]:
        return [second for seconds in self.rounds for second in seconds]


@torch.inference_mode()
def generation(bench: Bench) -> Outcome:
    """Late over early: median and 99th percentile; the fold; bytes of the states; the floor of a step."""
    model = _model(bench)
    early, late = (_place(bench, model, position) for position in bench.settings.positions)
    for turn in range(-1, bench.settings.decode_rounds):
        _generate_chunk(model, (early, late), bench.settings.local, keep=turn >= 0)
        bench.progress(f"generation: {'warm-up' if turn < 0 else f'round {turn + 1}'}")
    return Outcome(_figures(bench, model, early, late), [_measurement(place) for place in (early, late)])


def _model(bench: Bench) -> TransformerLM:
    torch.manual_seed(0)
    options = {"sketch_size": bench.settings.sketch_size, "local_chunk": bench.settings.local}
    changes = bench.settings.preset_changes
    return TransformerLM(preset(bench.settings.preset, attention_options=options, **changes)).eval()


def _place(bench: Bench, model: TransformerLM, position: int) -> _Place:
    """Read random tokens up to the start of the chunk that holds `position`."""
    start = position - position % bench.settings.local
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, start + 1), generator=generator)
    state = model.init_state(1)
    for span in ids[:, :start].split(_PREFILL_SPAN, dim=1):
        if span.shape[1]:
            _, state = model.extend_hidden(span, state)
            bench.progress(f"generation: {int(state.position[0]):,} of {start:,} tokens read")
    return _Place(position, state, ids[:, start:], [])


def _generate_chunk(model: TransformerLM, places: tuple[_Place, _Place], count: int, *, keep: bool) -> None:
    """One whole chunk at both places, a step here and a step there, from copies of the states."""
    running = [(place, place.state.clone(), place.token, []) for place in places]
    for _ in range(count):
        running = [(place, *_step(model, state, token, seconds)) for place, state, token, seconds in running]
    for place, _, _, seconds in running:
        if keep:
            place.rounds.append(seconds)


def _step(
    model: TransformerLM, state: ModelState, token: Tensor, seconds: list[float]
) -> tuple[ModelState, Tensor, list[float]]:
    started = time.perf_counter()
    logits, state = model.extend(token, state)
    token = logits.argmax(-1)
    return state, token, [*seconds, time.perf_counter() - started]


def _figures(bench: Bench, model: TransformerLM, early: _Place, late: _Place) -> list[Figure]:
    size = late.state.nbytes
    floor = floors.decoding_step(model, 1, size).seconds(bench.rates)
    note = f"{late.median * 1e3:.3g} ms a token, floor {floor * 1e3:.3g} ms"
    where = f"at {late.position:,} over {early.position:,}"
    full = bench.settings.positions == FULL.positions
    within = {"at_least": 1 - _WITHIN, "at_most": 1 + _WITHIN} if full else {}
    tail = late.percentile_99 / early.percentile_99
    folds = {"at_most": _MOST_FOLD} if full else {}
    return [
        Figure(f"generation, median {where}", late.median / early.median, note=note, **within),
        Figure(f"generation, 99th percentile {where}", tail, note=f"{late.percentile_99 * 1e3:.3g} ms", **within),
        Figure("generation, folding a chunk over the median", late.fold / late.median, note="late", **folds),
        Figure("generation, folding a chunk over the median", early.fold / early.median, note="early", **folds),
        Figure(f"generation, state bytes {where}", size / early.state.nbytes, at_least=1, at_most=1, note=f"{size:,}"),
    ]


def _measurement(place: _Place) -> dict[str, Any]:
    return {
        "position": place.position,
        "median_seconds": place.median,
        "percentile_99_seconds": place.percentile_99,
        "fold_seconds": place.fold,
        "state_bytes": place.state.nbytes,
        "seconds": place.rounds,
    }


def _percentile_99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]
