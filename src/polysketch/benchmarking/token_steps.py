"""One token at a time at several positions, against the same model with softmax attention and its cache of keys.

Every model generates the whole local chunk that begins at the position, so that one chunk is folded into the state.
They take turns of some tokens each: long enough that a model finds its weights in cache, as it does when it generates
alone, and short enough that a machine that slows down slows all models at all positions.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polysketch.benchmarking.agreement import checked_shape, require_agreement
from polysketch.benchmarking.mechanisms import prepare_generation
from polysketch.benchmarking.models import BASELINE, build_model, decoding_floor, state_at
from polysketch.benchmarking.settings import DecodingSettings
from polysketch.benchmarking.way_names import attentions, mechanism_of, with_baseline
from polysketch.benchmarking.workbench import Workbench
from polysketch.models import ModelState, TransformerLM, preset

_TURN = 32  # tokens
_WARM_UP = 4  # tokens


class _Decoder(NamedTuple):
    """A model, in the working dtype, at a position; every round begins with a copy of the state."""

    name: str
    position: int
    model: TransformerLM
    state: ModelState

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
        mean), ratio (the baseline's mean over the model's, the median over rounds), slowest_seconds, last_seconds (of
        the token that fills the chunk; the median over rounds), state_bytes, floor_seconds, all_seconds (of every token
        of every round).

    Raises:
        ValueError: attention that, generating, disagrees with the reference; nothing has been timed then.
    """
    for name in attentions(settings.models):
        _check(bench, settings, name)
    return _time(bench, settings)


@torch.no_grad()
def _check(bench: Workbench, settings: DecodingSettings, name: str) -> None:
    """Compare attention of the model's shape, generating, with the reference for the whole sequence."""
    config = preset(settings.preset)
    mechanism, options = mechanism_of(name, settings.sizes)
    shape = checked_shape(settings.local, config.num_heads, config.head_dim, settings.batch)
    make = partial(prepare_generation, mechanism, options, shape, bench.device, bench.dtype, local=settings.local)
    require_agreement(bench, make, f"{name}, generating,", backward=False)


@torch.inference_mode()
def _time(bench: Workbench, settings: DecodingSettings) -> list[dict[str, Any]]:
    names = with_baseline(settings.models, BASELINE)
    made = {name: build_model(name, settings.preset, settings.sizes) for name in names}
    if settings.state_dtype is not None:
        for model in made.values():
            model.keep_states_in(getattr(torch, settings.state_dtype))
    models = {name: model.to(bench.device, bench.dtype).eval() for name, model in made.items()}
    decoders = [
        _Decoder(name, start, model, state_at(model, settings.batch, start, room=settings.local))
        for start in dict.fromkeys(map(settings.start, settings.positions))
        for name, model in models.items()
    ]
    _round(decoders, settings.batch, min(_WARM_UP, settings.local))
    rounds = []
    for number in range(bench.repeats):
        rounds.append(_round(decoders, settings.batch, settings.local))
        bench.progress(f"decoding: round {number + 1} of {bench.repeats}")
    times = dict(zip(((one.position, one.name) for one in decoders), zip(*rounds, strict=True), strict=True))
    return [_measurement(bench, settings, one, times) for one in decoders]


def _round(decoders: Sequence[_Decoder], batch: int, count: int) -> list[list[float]]:
    """Seconds of `count` tokens by every decoder, some tokens here and some there."""
    steps = [decoder.stepper() for decoder in decoders]
    tokens = [torch.zeros(batch, 1, dtype=torch.int64, device=one.model.output_bias.device) for one in decoders]
    found: list[list[float]] = [[] for _ in decoders]
    for first in range(0, count, _TURN):
        for index, step in enumerate(steps):
            tokens[index], seconds = decode(step, tokens[index], min(_TURN, count - first))
            found[index] += seconds
    return found


def _measurement(
    bench: Workbench, settings: DecodingSettings, one: _Decoder, times: Mapping[tuple[int, str], Sequence[list[float]]]
) -> dict[str, Any]:
    rounds = times[one.position, one.name]
    chunks = {name: [sum(each) for each in found] for (at, name), found in times.items() if at == one.position}
    mean = statistics.median(chunks[one.name]) / settings.local
    return {
        "direction": f"decoding with {settings.preset}",
        "position": one.position,
        "series": one.name,
        **bench.measurement(chunks, one.name, BASELINE, settings.batch, decoding_floor(one.model, one.state)),
        "seconds": statistics.median(second for seconds in rounds for second in seconds),
        "mean_seconds": mean,
        "slowest_seconds": max(map(max, rounds)),
        "last_seconds": statistics.median(seconds[-1] for seconds in rounds),
        "tokens_per_second": settings.batch / mean,
        "state_bytes": one.state.nbytes,
        "all_seconds": list(rounds),
    }


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
