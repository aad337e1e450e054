"""`polysketch train`: train a model on prepared text, or go on with a run that was stopped."""

import dataclasses
import sys
from dataclasses import dataclass

from polysketch import attention
from polysketch.cli.attention_options import parse_attention_options
from polysketch.training import TrainingConfig, TrainingResult, train

__all__ = ["TrainFlags", "run"]

_SIGNAL_STATUS = 128


@dataclass(frozen=True, kw_only=True)
class TrainFlags(TrainingConfig):
    """Train a language model on a folder of prepared text; everything about the run goes into one run folder.

    A run may be stopped or killed at any moment: the same command with --resume goes on from the last checkpoint and
    ends as if nothing had happened. Exit status: 0 when the run is finished (or --max-minutes is reached), 130 after
    Ctrl-C, 143 after SIGTERM, both saved.
    """

    attention_options: tuple[str, ...] = ()  # type: ignore[assignment]
    """Options of the mechanism as key=value pairs, for instance sketch_size=32 local_chunk=256; a misspelt one lists
    those that exist."""


def run(flags: TrainFlags) -> int:
    """Train as the flags say.

    Returns:
        Exit status: 0 when the run is finished or reached --max-minutes; 130 after SIGINT and 143 after SIGTERM, the
        numbers a shell gives to a process that such a signal ended (128 + signal), with everything saved.
    """
    config = configuration(flags)
    result = train(config)
    print(_ending(result, config), file=sys.stderr)
    return 0 if result.stopped_by != "signal" else _SIGNAL_STATUS + (result.signal_number or 0)


def configuration(flags: TrainFlags) -> TrainingConfig:
    """The flags with the mechanism's options typed.

    Raises:
        ValueError: an unknown mechanism, option or type of value; the message lists those that exist.
    """
    mechanism = attention.mechanism_class(flags.attention)
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    values["attention_options"] = parse_attention_options(flags.attention_options, mechanism, flags.attention)
    return TrainingConfig(**values)


def _ending(result: TrainingResult, config: TrainingConfig) -> str:
    return _ENDINGS[result.stopped_by].format(step=result.step, steps=config.steps, folder=result.folder)


_ENDINGS = {
    "finished": "finished: {steps} steps, everything is in {folder}; next: polysketch evaluate {folder}",
    "signal": "stopped after step {step} of {steps} and saved in {folder}; the same command with --resume goes on",
    "time": "time is up after step {step} of {steps}, saved in {folder}; the same command with --resume goes on",
}
