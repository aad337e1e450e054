"""How `polysketch generate` finds a text: token by token, with guesses, or by beams."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from polysketch.generation import Drafter, GenerationResult
    from polysketch.models import TransformerLM

__all__ = ["Way", "check_way", "generated"]

OnToken = Callable[[int, int], bool | None]


@dataclass(frozen=True)
class Way:
    """How texts are found; attributes as the flags of `polysketch generate`. Token by token where all are None.

    Prompts stand `num_samples` times each, one behind the other. A search by beams gives so many of its beams.
    """

    beams: int | None = None
    lookup: int | None = None
    assistant: Path | None = None
    num_samples: int = 1


def check_way(way: Way, *, interactive: bool, restricted: bool) -> None:
    """Refuse flags that contradict each other, and flags that would do nothing.

    Args:
        way: as asked for.
        interactive: whether a conversation is asked for.
        restricted: whether one of --top-k, --top-p, --repetition-penalty and --stop is given.
    """
    asked = {"--beams": way.beams, "--lookup": way.lookup, "--assistant": way.assistant}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"expected one of --beams, --lookup and --assistant, found {' and '.join(given)}")
    if given and interactive:
        raise ValueError(f"expected {given[0]} without --interactive, found both")
    for name in ("beams", "lookup"):
        count = getattr(way, name)
        if count is not None and count < 1:
            raise ValueError(f"--{name}: expected at least 1, found {count}")
    if way.beams is not None and way.num_samples > way.beams:
        raise ValueError(
            f"--num-samples: expected at most {way.beams}, the --beams to take from, found {way.num_samples}"
        )
    if way.beams is not None and restricted:
        others = "--top-k, --top-p, --repetition-penalty and --stop"
        raise ValueError(f"expected --beams without {others}: nothing is drawn or shown on the way")


def generated(
    way: Way,
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    ends: Collection[int],
    on_token: OnToken,
    settings: dict[str, Any],
    samples: Sequence[int] | None = None,
) -> GenerationResult:
    """Continue prompts.

    Args:
        way: how.
        model: that goes on.
        prompts: token ids.
        ends: ids that end a text.
        on_token: told every token of what is found.
        settings: for `generation.generate`: how many tokens, and how they are drawn.
        samples: which sample of its prompt each row is. Default: how many equal prompts stand before it.

    Raises:
        ValueError: more tokens than a model of learned positions has.
    """
    _require_positions(model, prompts, settings["max_new_tokens"])
    if way.beams is not None:
        return _by_beams(model, prompts, ends, on_token, settings["max_new_tokens"], way.beams, way.num_samples)
    if way.lookup is not None or way.assistant is not None:
        return _with_drafts(model, prompts, _drafter(way, model), ends, on_token, settings, samples)
    from polysketch.generation import generate

    return generate(model, prompts, stop=ends, on_token=on_token, samples=samples, **settings)


def _require_positions(model: TransformerLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Refuse before anything is written what a model of learned positions has no room for."""
    most = getattr(model, "most_tokens", None)
    longest = max(map(len, prompts))
    if most is not None and longest + new_tokens - 1 > most:
        raise ValueError(
            f"expected prompts and new tokens of at most {most} together, for the model has learned so many positions; "
            f"found a prompt of {longest} and --max-new-tokens {new_tokens}"
        )


def _by_beams(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    ends: Collection[int],
    on_token: OnToken,
    max_new_tokens: int,
    num_beams: int,
    of_each: int,
) -> GenerationResult:
    """The best beams, `of_each` prompt; a prompt that stands so many times is searched once."""
    from polysketch.generation import GenerationResult, beam_search

    found = beam_search(model, prompts[::of_each], max_new_tokens=max_new_tokens, num_beams=num_beams, stop=ends)
    fewest = min(map(len, found.beams))
    if fewest < of_each:
        raise ValueError(
            f"--num-samples: expected at most the {fewest} continuations that --beams found, got {of_each}"
        )
    best = [beam for beams in found.beams for beam in beams[:of_each]]
    for row, beam in enumerate(best):
        for token in beam.tokens:
            on_token(row, token)
    return GenerationResult(
        [beam.tokens for beam in best],
        [beam.stopped for beam in best],
        sum(len(beam.tokens) for beam in best) / found.seconds,
        found.prefill_seconds,
        found.state_bytes,
        "beams change places",
        found.steps,
    )


def _with_drafts(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    ends: Collection[int],
    on_token: OnToken,
    settings: dict[str, Any],
    samples: Sequence[int] | None,
) -> GenerationResult:
    """One prompt after the other, for guesses are right to different lengths."""
    from polysketch.generation import GenerationResult, generate_with_drafts
    from polysketch.generation.randomness import earlier_equals

    results = []
    started = time.perf_counter()
    numbers = earlier_equals(prompts) if samples is None else samples
    for row, (prompt, sample) in enumerate(zip(prompts, numbers, strict=True)):
        told = _of_row(on_token, row)
        results.append(
            generate_with_drafts(model, prompt, drafter, sample=sample, stop=ends, on_token=told, **settings)
        )
    prefill_seconds = sum(result.prefill_seconds for result in results)
    num_tokens = sum(len(result.tokens[0]) for result in results)
    return GenerationResult(
        [result.tokens[0] for result in results],
        [result.stopped[0] for result in results],
        num_tokens / (time.perf_counter() - started - prefill_seconds),
        prefill_seconds,
        max(result.state_bytes for result in results),
        results[0].no_graph,
        sum(result.steps for result in results),
    )


def _of_row(on_token: OnToken, row: int) -> OnToken:
    return lambda _, token: on_token(row, token)


def _drafter(way: Way, model: TransformerLM) -> Drafter:
    from polysketch.generation import AssistantDrafts, PromptLookup

    if way.lookup is not None:
        return PromptLookup(way.lookup)
    assert way.assistant is not None
    assistant = _load_assistant(way.assistant, next(model.parameters()).device)
    if assistant.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"--assistant: expected a model of the same tokenizer, with {model.config.vocab_size:,} tokens, found "
            f"{assistant.config.vocab_size:,} in {way.assistant}"
        )
    return AssistantDrafts(assistant)


def _load_assistant(folder: Path, device: torch.device) -> TransformerLM:
    from polysketch.integrations.transformers_folder import is_transformers_folder

    if is_transformers_folder(folder):
        from polysketch.integrations.continuing import load_to_continue

        model: Any = load_to_continue(folder, device=device)[0]
        return model
    from polysketch.training import load_model
    from polysketch.training.run_folder import find_run, require_text

    require_text(folder, find_run(folder, "latest")[0])
    return load_model(folder, device=device)[0]
