"""A training step of gpt2-small at several contexts, and decoding at several positions."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.budget import Section
from benchmarks.gpu.cases import out_of_memory, release_memory, text_of
from benchmarks.journal import Journal
from polysketch.benchmarking import floors
from polysketch.benchmarking.timing import Clock, Rates, peak_memory, summary
from polysketch.models import TransformerLM, preset

MECHANISMS = ("softmax", "polysketch")
_STEP_TOKENS = 2**15
_PREFILL_SPAN = 2**12
_DECODED = 96  # tokens, with a chunk boundary in the middle
_LOCAL_CHUNK = 1024


def time_training(clock: Clock, rates: Rates, section: Section, journal: Journal, *, quick: bool) -> None:
    """Steps of constant tokens, bfloat16 autocast and AdamW, at several contexts."""
    tokens, lengths = (128, [32, 64]) if quick else (_STEP_TOKENS, [2**15, 2**11, 2**13, 2**12, 2**14])
    points = [{"batch": tokens // length, "length": length} for length in lengths]
    _measure_all("train", points, partial(_train, clock, rates, quick), clock.device, section, journal)


def time_decoding(clock: Clock, rates: Rates, section: Section, journal: Journal, *, quick: bool) -> None:
    """One token at a time, bfloat16, at several positions; 16 rows at once where their keys and values fit."""
    # Not at powers of two beyond 1k: there the keys and values of softmax move into buffers of twice the size.
    places = [(64, 1), (64, 2), (128, 1), (128, 2)]
    if not quick:
        places = [(31, 1), (1, 1), (127, 1), (31, 16), (1, 16), (7, 1), (7, 16)]
        places = [(chunks * _LOCAL_CHUNK, batch) for chunks, batch in places]
    points = [{"batch": batch, "position": position} for position, batch in places]
    _measure_all("decode", points, partial(_decode, clock, rates, quick), clock.device, section, journal)


def _measure_all(
    kind: str,
    points: list[dict[str, int]],
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    device: torch.device,
    section: Section,
    journal: Journal,
) -> None:
    """Every mechanism at every point, as far as time allows."""
    spent = 1.0
    for labels in [{"mechanism": name, **point} for point in points for name in MECHANISMS]:
        if not section.fits(2 * spent):
            journal.write("skipped", section=kind, **labels, reason="no time left in this section")
            continue
        started = time.monotonic()
        _attempt(kind, labels, partial(measure, labels), journal)
        release_memory(device)
        spent = max(1.0, time.monotonic() - started)


def _attempt(kind: str, labels: dict[str, Any], measure: Callable[[], dict[str, Any]], journal: Journal) -> None:
    """Record what `measure` gives, or why it gave nothing."""
    try:
        record = journal.write(kind, **labels, **measure())
    except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
        text = text_of(error)
        journal.write("failed", section=kind, **labels, error=text, out_of_memory=out_of_memory(error))
        print(f"  {kind} {labels}: {text}", flush=True)
    else:
        rate, share = record["tokens_per_second"], record["floor_seconds"] / record["seconds"]
        print(f"  {kind} {labels}: {rate:,.0f} tokens/s, {share:.1%} of the floor", flush=True)


def _model(name: str, device: torch.device, *, quick: bool) -> TransformerLM:
    torch.manual_seed(0)
    small = {"num_layers": 2, "vocab_size": 300} if quick else {}
    options = {"local_chunk": 16 if quick else _LOCAL_CHUNK} if name == "polysketch" else {}
    config = preset("tiny" if quick else "gpt2-small", attention=name, attention_options=options, **small)
    return TransformerLM(config).to(device)


def _train(clock: Clock, rates: Rates, quick: bool, labels: dict[str, Any]) -> dict[str, Any]:
    model = _model(labels["mechanism"], clock.device, quick=quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=clock.device.type == "cuda")
    shape = (labels["batch"], labels["length"] + 1)
    ids = torch.randint(model.config.vocab_size, shape, device=clock.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(clock.device.type, dtype=torch.bfloat16):
            loss = model.loss(ids)
        loss.backward()
        optimizer.step()

    with peak_memory(clock.device) as peak:
        step()
    timing = clock.measure(step, limit_seconds=1.5)
    floor = floors.training_step(model, labels["batch"], labels["length"])
    rate = labels["batch"] * labels["length"] / timing.seconds
    counted = {"operations": floor.operations, "floor_seconds": floor.seconds(rates)}
    return {**vars(timing), "tokens_per_second": rate, "peak_bytes": peak.bytes, **counted}


@torch.inference_mode()
def _decode(clock: Clock, rates: Rates, quick: bool, labels: dict[str, Any]) -> dict[str, Any]:
    model = _model(labels["mechanism"], clock.device, quick=quick).to(torch.bfloat16).eval()
    decoded = 8 if quick else _DECODED
    ids = torch.randint(model.config.vocab_size, (labels["batch"], labels["position"]), device=clock.device)
    state = model.init_state(labels["batch"])
    started = time.perf_counter()
    # Half of the decoded tokens lie before `position`, a multiple of the chunk: one chunk is folded.
    for span in ids[:, : labels["position"] - decoded // 2].split(_PREFILL_SPAN, dim=1):
        hidden, state = model.extend_hidden(span, state)
    token = model.logits(hidden[:, -1:]).argmax(-1)
    _wait(clock.device)
    prefill_seconds = time.perf_counter() - started
    seconds = _step_seconds(model, state, token, decoded, clock.device)
    timing = summary(seconds)
    floor = floors.decoding_step(model, labels["batch"], state.nbytes).seconds(rates)
    return {
        **vars(timing),
        "tokens_per_second": labels["batch"] / timing.seconds,
        "state_bytes": state.nbytes,
        "prefill_seconds": prefill_seconds,
        "floor_seconds": floor,
    }


def _step_seconds(model: TransformerLM, state: Any, token: Tensor, count: int, device: torch.device) -> list[float]:
    """Host seconds of each step, to the token's arrival: what a reader waits for."""
    seconds = []
    for turn in range(count + 2):
        _wait(device)
        started = time.perf_counter()
        logits, state = model.extend(token, state)
        token = logits.argmax(-1)
        _wait(device)
        if turn >= 2:
            seconds.append(time.perf_counter() - started)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
