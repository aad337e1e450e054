"""What is asked of an engine, and what it tells."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from polysketch.generation.sampling import Sampler

__all__ = ["Event", "Finish", "Request"]

Finish = Literal["stop", "length", "error"]
"""Why a request ended: a stop id or string, its number of tokens, or a failure."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, with settings of its own.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at least 1.
        sampler: how tokens are chosen.
        seed: of the draws.
        sample: which of several samples of this prompt and seed: `generate` draws the same for the equal prompt that
            stands there, from 0.
        stop_ids: ids that end the continuation and are not part of it.
        until: told every new token but a stop id; True ends the continuation, for instance `TextStream.add`.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    seed: int = 0
    sample: int = 0
    stop_ids: Collection[int] = frozenset()
    until: Callable[[int], bool] | None = None


@dataclass(frozen=True)
class Event:
    """What became known of a request in a step.

    Attributes:
        ticket: the request's number, from `Engine.add`.
        token: the new token; None for a stop id, or a failure.
        finish: why the request has ended with this; None where it goes on.
        position: tokens that the request's state has read.
        reused: prompt tokens that were not read, because a snapshot had them.
        error: what failed, in one line.
    """

    ticket: int
    token: int | None
    finish: Finish | None
    position: int
    reused: int = 0
    error: str | None = None
