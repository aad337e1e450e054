"""Decoding with gpt2-small at several contexts: at batch 1, and at the largest batch whose states fit the device.

States are filled with random numbers instead of by reading a prompt: what a step takes does not depend on them. A step
is captured as a graph of the device where the model allows it. Steps are timed in the middle of a chunk of recent
tokens, and the step that fills one is timed apart: each step is charged its share of it.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Cases, Labels, text_of
from benchmarks.gpu.language_model import LARGEST, MODELS, build_model, series_of
from polysketch.benchmarking.models import attention_states, decoding_floor, fill, state_at
from polysketch.benchmarking.timing import summary
from polysketch.benchmarking.token_steps import decode
from polysketch.generation.captured import CapturedStep, why_no_graph
from polysketch.models import ModelState, TransformerLM

_POSITIONS = (2**15, 2**10, 2**17, 2**13, 2**12)
_STEPS = 24  # timed, after as many as are needed to warm up
_WARM_UP = 3
_WINDOWS = 3  # around the end of a chunk
_KEPT_FREE = 0.2  # of the device's memory, for weights, logits and activations
_MOST_ROWS = 8_192


def time_decoding(bench: Bench) -> None:
    """One token at a time, bfloat16; the most wanted contexts first."""
    positions = (64, 128) if bench.quick else _POSITIONS
    batches = (1, 2) if bench.quick else (LARGEST, 1)
    points = [
        {"model": name, "batch": batch, "position": position}
        for position in positions
        for batch in batches
        for name in MODELS
        if not bench.match or any(part in name for part in bench.match)
        if not name.startswith("polysketch")  # its state cannot be filled without reading the tokens
        if position == positions[0] or not name.endswith("r=64")
    ]
    Cases("decode", bench, series_of, partial(_decode, bench)).run(points)


@torch.inference_mode()
def _decode(bench: Bench, labels: Labels) -> dict[str, Any]:
    model = build_model(labels["model"], bench.device, quick=bench.quick).to(torch.bfloat16).eval()
    batch, position = labels["batch"], labels["position"]
    rows = _rows_that_fit(model, position) if batch == LARGEST else batch
    steps = 4 if bench.quick else _STEPS
    step, state, reason = _stepper(model, rows)
    chunk = max(getattr(layer, "local_chunk", 0) for layer in attention_states(state))
    fill(state, model, position + chunk // 2, room=steps + _WARM_UP)
    timing = summary(_step_seconds(step, rows, steps, bench.device))
    filling = None
    if chunk:
        filling = _filling_seconds(step, state, model, position // chunk * chunk + chunk, bench.device)
    seconds = timing.seconds if filling is None else timing.seconds + max(0.0, filling - timing.seconds) / chunk
    floor = decoding_floor(model, state).seconds(bench.rates)
    return {
        **vars(timing),
        "seconds": seconds,
        "middle_step_seconds": timing.seconds,
        "filling_step_seconds": filling,
        "rows": rows,
        "largest": batch != 1,
        "captured": reason is None,
        "why_not_captured": reason,
        "tokens_per_second": rows / seconds,
        "state_bytes": state.nbytes,
        "floor_seconds": floor,
    }


def _stepper(model: TransformerLM, rows: int) -> tuple[Callable[[Tensor], Tensor], ModelState, str | None]:
    """What takes a step, the state that it moves on, and why it is no captured graph."""
    state = model.init_state(rows)
    reason = why_no_graph(model, state)
    if reason is None:
        try:
            return CapturedStep(model, state), state, None
        except RuntimeError as error:  # the plain step's time is worth having
            reason = f"the capture failed: {text_of(error)}"
        state = model.init_state(rows)
    return lambda chosen: model.extend(chosen[:, None], state)[0][:, -1], state, reason


def _filling_seconds(
    step: Callable[[Tensor], Tensor], state: ModelState, model: TransformerLM, end: int, device: torch.device
) -> float:
    """What the step takes that fills a chunk: the slowest around its end, the median of several windows."""
    slowest = []
    for _ in range(_WINDOWS):
        fill(state, model, end - _WARM_UP - 1, room=0)
        slowest.append(max(_step_seconds(step, len(state.position), 3, device)))
    return statistics.median(slowest)


def _rows_that_fit(model: TransformerLM, position: int) -> int:
    """As many as the free memory holds states of, a share of it kept free."""
    of_a_row = state_at(model, 1, position, room=_STEPS + _WARM_UP).nbytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return max(1, min(_MOST_ROWS, int((free - _KEPT_FREE * total) // of_a_row)))


def _step_seconds(step: Callable[[Tensor], Tensor], rows: int, count: int, device: torch.device) -> list[float]:
    """Host seconds of each step, to the token's arrival: what a reader waits for."""
    token = torch.zeros(rows, dtype=torch.int64, device=device)
    return decode(lambda token: step(token).argmax(-1), token, _WARM_UP + count)[1][_WARM_UP:]
