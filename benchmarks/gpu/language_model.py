"""Training steps of gpt2-small at several contexts, with softmax and with polysketch attention."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.budget import Section
from benchmarks.gpu.cases import out_of_memory, release_memory, text_of
from benchmarks.journal import Journal
from polysketch.benchmarking import floors
from polysketch.benchmarking.timing import Clock, Rates, peak_memory
from polysketch.models import TransformerLM, preset

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "random r=32": {"sketch_size": 32, "learned": False},
    "learned r=32": {"sketch_size": 32, "learned": True},
    "random r=64": {"sketch_size": 64, "learned": False},
    "learned r=64": {"sketch_size": 64, "learned": True},
}
"""Every model that is timed: softmax attention, and options of polysketch attention."""

_STEP_TOKENS = 2**15
_LOCAL_CHUNK = 256


def time_training(clock: Clock, rates: Rates, section: Section, journal: Journal, *, quick: bool) -> None:
    """Steps of constant tokens, bfloat16 autocast and AdamW, at several contexts."""
    tokens, lengths = (128, [32, 64]) if quick else (_STEP_TOKENS, [2**15, 2**11, 2**13, 2**12, 2**14])
    points = [{"batch": tokens // length, "length": length} for length in lengths]
    labelled = [{"model": name, **point} for point in points for name in MODELS]
    measure_all("train", labelled, partial(_train, clock, rates, quick), clock.device, section, journal)


def measure_all(
    kind: str,
    points: list[dict[str, Any]],
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    device: torch.device,
    section: Section,
    journal: Journal,
) -> None:
    """Every point, as far as time allows and not in the journal already; what fails is recorded with its reason."""
    spent = 1.0
    for labels in points:
        if journal.has(**labels):
            continue
        if not section.fits(2 * spent):
            journal.write("skipped", section=kind, **labels, reason="no time left in this section")
            continue
        started = time.monotonic()
        journal.write("begun", section=kind, **labels)
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


def build_model(name: str, device: torch.device, *, quick: bool) -> TransformerLM:
    """gpt2-small with one of `MODELS`, or a tiny model."""
    torch.manual_seed(0)
    small = {"num_layers": 2, "vocab_size": 300} if quick else {}
    options = dict(MODELS[name])
    attention = options.pop("attention", "polysketch")
    if attention == "polysketch":
        options["local_chunk"] = 16 if quick else _LOCAL_CHUNK
    config = preset("tiny" if quick else "gpt2-small", attention=attention, attention_options=options, **small)
    with device:  # weights are drawn where they stay: on the CPU that takes longer than what is timed
        return TransformerLM(config)


def _train(clock: Clock, rates: Rates, quick: bool, labels: dict[str, Any]) -> dict[str, Any]:
    model = build_model(labels["model"], clock.device, quick=quick)
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
    timing = clock.measure(step, limit_seconds=1.0)
    floor = floors.training_step(model, labels["batch"], labels["length"])
    rate = labels["batch"] * labels["length"] / timing.seconds
    counted = {"operations": floor.operations, "floor_seconds": floor.seconds(rates)}
    return {**vars(timing), "tokens_per_second": rate, "peak_bytes": peak.bytes, **counted}
