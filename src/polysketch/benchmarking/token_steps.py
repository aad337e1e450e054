"""One token at a time at several positions, against the same model with softmax attention and its cache of keys.

Every model generates the whole local chunk that begins at the position, so that one chunk is folded into the state.
They take turns of some tokens each: long enough that a model finds its weights in cache, as it does when it generates
alone, and short enough that a machine that slows down slows all of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.benchmarking.agreement import checked_shape, require_agreement
from polysketch.benchmarking.mechanisms import prepare_generation
from polysketch.benchmarking.models import BASELINE, build_model, decoding_floor, state_at
from polysketch.benchmarking.settings import DecodingSettings
from polysketch.benchmarking.way_names import mechanism_of, with_baseline
from polysketch.benchmarking.workbench import Workbench
from polysketch.models import ModelState, TransformerLM, preset

_TURN = 32  # tokens
_WARM_UP = 4  # tokens


@dataclass
class Decoder:
    """A model at a position.

    Attributes:
        model: in the working dtype.
        state: before the position; every round begins with a copy.
        token: (batch, 1), the first to read.
        rounds: seconds of every token of every round.
    """

    model: TransformerLM
    state: ModelState
    token: Tensor
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of every token of all rounds."""
        return [second for seconds in self.rounds for second in seconds]

    def stepper(self) -> Callable[[Tensor], Tensor]:
        """What reads a token (batch, 1) and gives the next, from a copy of the state on."""
        state = self.state.clone()

        def step(token: Tensor) -> Tensor:
            nonlocal state
            logits, state = self.model.extend(token, state)
            return logits.argmax(-1)

        return step


def time_decoding(bench: Workbench, settings: DecodingSettings) -> list[dict[str, Any]]:
    """Generate one local chunk `bench.repeats` times at every position.

    Returns:
        A measurement for each position and model, the baseline first: position, series, seconds (the median of a
        token), mean_seconds (over the chunk, its folding included; the median over rounds), tokens_per_second (by that
        mean), ratio (the baseline's mean over the model's, the median over rounds), slowest_seconds, state_bytes,
        floor_seconds, all_seconds (of every token of every round).

    Raises:
        ValueError: attention that, generating, disagrees with the reference; nothing has been timed then.
    """
    for name in settings.models:
        _check(bench, settings, name)
    return [one for position in settings.positions for one in _time_position(bench, settings, position)]


@torch.no_grad()
def _check(bench: Workbench, settings: DecodingSettings, name: str) -> None:
    """Compare attention of the model's shape, generating, with the reference for the whole sequence."""
    config = preset(settings.preset)
    mechanism, options = mechanism_of(name, settings.sizes)
    shape = checked_shape(settings.local, config.num_heads, config.head_dim, settings.batch)
    make = partial(prepare_generation, mechanism, options, shape, bench.device, bench.dtype, local=settings.local)
    require_agreement(bench, make, f"{name}, generating,", backward=False)


@torch.inference_mode()
def _time_position(bench: Workbench, settings: DecodingSettings, position: int) -> list[dict[str, Any]]:
    start = settings.start(position)
    decoders = {name: _decoder(bench, settings, name, start) for name in with_baseline(settings.models, BASELINE)}
    time_rounds(bench, decoders, settings.local, warm_up=min(_WARM_UP, settings.local), what=f"decoding at {start:,}")
    chunks = {name: [sum(seconds) for seconds in decoder.rounds] for name, decoder in decoders.items()}
    return [
        {
            "direction": f"decoding with {settings.preset}",
            "position": start,
            "series": name,
            **bench.measurement(chunks, name, BASELINE, settings.batch, decoding_floor(decoder.model, decoder.state)),
            "seconds": statistics.median(decoder.seconds),
            "mean_seconds": statistics.median(chunks[name]) / settings.local,
            "slowest_seconds": max(decoder.seconds),
            "tokens_per_second": settings.batch * settings.local / statistics.median(chunks[name]),
            "state_bytes": decoder.state.nbytes,
            "all_seconds": decoder.rounds,
        }
        for name, decoder in decoders.items()
    ]


def _decoder(bench: Workbench, settings: DecodingSettings, name: str, start: int) -> Decoder:
    model = build_model(name, settings.preset, settings.sizes).to(bench.device, bench.dtype).eval()
    state = state_at(model, settings.batch, start)
    bench.progress(f"decoding: {name} is at {start:,}")
    return Decoder(model, state, torch.zeros(settings.batch, 1, dtype=torch.int64, device=bench.device))


def time_rounds(
    bench: Workbench, decoders: Mapping[str, Decoder], count: int, *, warm_up: int, what: str, turn: int = _TURN
) -> None:
    """Generate `count` tokens by every model `bench.repeats` times, from copies of the states.

    Args:
        bench: says how often, and is told of every round.
        decoders: the models; their `rounds` are filled.
        count: tokens of a round.
        warm_up: tokens of a round that is not kept.
        what: names it for `bench.progress`.
        turn: tokens by one model before the next one's turn.
    """
    _take_turns(decoders, warm_up, turn)
    for decoder in decoders.values():
        decoder.rounds.clear()
    for number in range(bench.repeats):
        _take_turns(decoders, count, turn)
        bench.progress(f"{what}: round {number + 1} of {bench.repeats}")


def _take_turns(decoders: Mapping[str, Decoder], count: int, turn: int) -> None:
    """A round: `count` tokens by every model, some tokens here and some there."""
    running = [(decoder, decoder.stepper()) for decoder in decoders.values()]
    tokens = [decoder.token for decoder, _ in running]
    for decoder, _ in running:
        decoder.rounds.append([])
    for first in range(0, count, turn):
        for index, (decoder, step) in enumerate(running):
            tokens[index], seconds = decode(step, tokens[index], min(turn, count - first))
            decoder.rounds[-1] += seconds


def decode(step: Callable[[Tensor], Tensor], token: Tensor, count: int) -> tuple[Tensor, list[float]]:
    """Generate `count` tokens: the last ones, and the seconds of each step, to their arrival in host memory.

    Args:
        step: tokens of all rows -> the next ones.
        token: the first ones.
        count: steps.
    """
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        token = step(token)
        token.flatten()[0].item()  # what a reader waits for, and a GPU with it
        seconds.append(time.perf_counter() - started)
    return token, seconds
