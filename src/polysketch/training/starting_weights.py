"""Weights of another run for a model that answers what a task asks: all of them, or those of its encoder."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from polysketch.models.answering import AnsweringConfig
from polysketch.models.base import TokenModel
from polysketch.models.encoder_config import EncoderConfig
from polysketch.tasks import Task
from polysketch.tasks.masked import MaskedTokens
from polysketch.training.loading import load_answering_model
from polysketch.training.run_folder import find_run, task_of_run
from polysketch.training.tensors import load_weights


def take_weights(model: TokenModel, sizes: AnsweringConfig, task: Task, run: Path, new: Collection[str] = ()) -> str:
    """Fill a model with the latest weights of another run.

    A model of the same sizes, which asks the same, gives all. Of others an encoder gives its body, and what stands on
    top of it here stays new. The mask of one that learned hidden tokens is left behind. A model that asks the same by
    another mechanism gives all, where `new` names what it lacks.

    Args:
        model, sizes, task: what is to be trained, and on what.
        run: folder of the other run.
        new: parts that the other run lacks, as for `load_weights`.

    Returns:
        What was taken, in words.

    Raises:
        FileNotFoundError: no run, or no checkpoint in it.
        ValueError: it learned to continue text, its ids are others, or its model is of another kind or other sizes.
    """
    saved, _ = find_run(run)
    if task_of_run(saved) is None:
        raise ValueError(
            f"--init-from: expected a run that learned a task, or --objective masked, found {run}, which learned to "
            "continue text"
        )
    _check_alphabet(saved["data"].get("alphabet", ""), task.alphabet, run)
    other, other_sizes, _ = load_answering_model(run)
    if new:
        return _all_but(model, sizes, other, other_sizes, run, new)
    if other_sizes == sizes:
        load_weights(model, other.state_dict(), str(run))
        return "all weights"
    masked = saved["data"]["task"] == MaskedTokens.name
    _check_sizes(sizes, other_sizes, run, masked=masked)
    body = other.encoder.state_dict()  # type: ignore[union-attr]
    if masked:  # it has one more id, that of a hidden token
        body["embedding.weight"] = body["embedding.weight"][: sizes.vocab_size]
    load_weights(model.encoder, body, str(run))  # type: ignore[arg-type]
    return "the encoder; what stands on it is new"


def _all_but(
    model: TokenModel,
    sizes: AnsweringConfig,
    other: TokenModel,
    found: AnsweringConfig,
    run: Path,
    new: Collection[str],
) -> str:
    if (found.asks, found.vocab_size, found.num_classes) != (sizes.asks, sizes.vocab_size, sizes.num_classes):
        raise ValueError(
            f"--init-new: expected a run that asks {sizes.asks!r} of {sizes.vocab_size} ids, as this one, found one "
            f"that asks {found.asks!r} of {found.vocab_size}: {run}"
        )
    load_weights(model, other.state_dict(), str(run), new)
    return f"all weights; new is {', '.join(new)}"


def _check_alphabet(found: str, expected: str, run: Path) -> None:
    if found and expected and found != expected:
        raise ValueError(
            f"--init-from: expected a run whose ids stand for the same as here, {_short(expected)}, found "
            f"{_short(found)} in {run}: tokens would mean something else"
        )


def _short(alphabet: str) -> str:
    return alphabet if len(alphabet) <= 40 else f"{alphabet[:12]}..."


def _check_sizes(sizes: AnsweringConfig, other: AnsweringConfig, run: Path, *, masked: bool) -> None:
    if not isinstance(sizes.sizes, EncoderConfig) or not isinstance(other.sizes, EncoderConfig):
        raise ValueError(
            f"--init-from: expected an encoder for an encoder, or a model of the same kind and sizes, found one that "
            f"asks {other.asks!r} in {run} for one that asks {sizes.asks!r}"
        )
    ids = other.vocab_size - masked
    if ids != sizes.vocab_size:
        raise ValueError(f"--init-from: expected a run with {sizes.vocab_size} ids, found one with {ids}: {run}")
    own, found = sizes.sizes.to_dict(), other.sizes.to_dict()
    for name in sorted(own.keys() - {"vocab_size"}):
        if own[name] != found[name]:
            raise ValueError(
                f"--init-from: expected an encoder of the same sizes, found {name} {_told(found[name])} in {run} and "
                f"{_told(own[name])} here"
            )


def _told(value: Any) -> str:
    return "nothing" if value in ({}, None) else str(value)
