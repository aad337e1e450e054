"""`polysketch train`: train a model on prepared text or a task, or go on with a run that was stopped."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.cli import exit_status
from polysketch.cli.attention_options import parse_attention_options, parse_options_by_name
from polysketch.cli.first_run import is_first_run, longer_run, opening, sizes_where_none_are_given
from polysketch.cli.next_command import next_command
from polysketch.cli.run_defaults import flag_values, value_of
from polysketch.cli.usual_folders import run_folder
from polysketch.distributed.launch import find_launch
from polysketch.training import TrainingConfig
from polysketch.training.option_groups import ModelOptions

if TYPE_CHECKING:
    from polysketch.training import TrainingResult

__all__ = ["TrainFlags", "defaults", "run"]


@dataclass(frozen=True, kw_only=True)
class TrainFlags(TrainingConfig):
    """Train a model on a folder of prepared text, or of a task; everything about the run goes into one run folder.

    A run may be stopped or killed at any moment. The same command with --resume goes on from the last checkpoint and
    ends as if nothing had happened. The exit status is 0 when the run is finished or --max-minutes is reached, 130
    after Ctrl-C and 143 after SIGTERM. All of these save the run first.

    A new run on text without --steps, --context, --batch-size and --max-minutes is a first one: 650 steps of 4 rows of
    512 tokens, about five minutes with preset tiny on two cores. It ends with what a longer one would take.

    Several processes, or machines, train one model where torchrun starts them: torchrun --nproc-per-node 8 -m
    polysketch train ..., with --mesh for what they share. The batch, the loss and the checkpoints are those of one
    process.

    Examples:
      polysketch train --data data/books --preset tiny
      polysketch train --out runs/books --resume
      polysketch train --data data/reversal --steps 600 --out runs/reversal
    """

    out: Path | None = None  # type: ignore[assignment]
    """Run folder to create: configuration, metrics, checkpoints and plot go there. Default: runs/NAME, with the name of
    --data."""

    attention: str | None = None
    """Attention mechanism: polysketch, softmax, polynomial or another; an unknown name lists those that exist. Several,
    with commas between, are a pattern that is repeated over the layers: based,sliding-window. Default: the preset's
    own, else polysketch."""

    attention_options: tuple[str, ...] = ()  # type: ignore[assignment]
    """Options of the mechanism as key=value pairs, for instance sketch_size=24 window=256; with a pattern, as
    NAME.key=value: sliding-window.window=64. A misspelt one lists those that exist."""


def defaults(arguments: Sequence[str]) -> TrainFlags | None:
    """The flags of the run that `--resume` goes on with; the sizes of the model whose weights `--init-from` names.

    A run that is new, or of which the command says later what is wrong with it, has the sizes of a first one where
    nothing says how long it should take; None without these too.

    Raises:
        FileNotFoundError, ValueError: `--resume` names no run, or a damaged one, and no data to begin one with.
    """
    import tyro

    begun = _options_in(_folder_named_by(arguments)) if "--resume" in arguments else None
    if begun is not None:
        return TrainFlags(**{"data": tyro.MISSING, **flag_values(TrainFlags, begun)}, resume=True)
    if "--resume" in arguments and value_of("--data", arguments) is None:
        _require_run(value_of("--out", arguments))
    length = sizes_where_none_are_given(arguments)
    named = _options_in(value_of("--init-from", arguments))
    if named is None:
        return TrainFlags(**length, data=tyro.MISSING) if length else None
    sizes = {field.name for field in dataclasses.fields(ModelOptions)} - {"init_from", "init_new"}
    values = {name: value for name, value in flag_values(TrainFlags, named).items() if name in sizes}
    return TrainFlags(**values, **length, data=tyro.MISSING)


def _folder_named_by(arguments: Sequence[str]) -> str | None:
    """The run folder of a command line, which --data names where --out does not."""
    out, data = value_of("--out", arguments), value_of("--data", arguments)
    return out or (data and str(run_folder(Path(data))))


def _require_run(folder: str | None) -> None:
    """Say what is wrong with a folder, rather than ask for data that the run in it would have named."""
    from polysketch.training.run_folder import RunFolder

    if folder is None:
        return
    try:
        RunFolder(Path(folder)).read_config()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}, or give --data to begin a run there") from None


def _options_in(folder: str | None) -> dict[str, Any] | None:
    """The options of a run as flags have them; None where there is no run."""
    from polysketch.training.run_folder import RunFolder

    if not folder:
        return None
    run = RunFolder(Path(folder))
    try:
        config = run.read_config()
    except (OSError, ValueError):
        return None
    options = dict(config["training"])
    if isinstance(options.get("attention"), list):
        options["attention"] = ",".join(options["attention"])
    options["attention_options"] = ()  # not always possible as texts: `configuration` takes them from the run
    if "data" in options and not Path(options["data"]).exists():  # given from another folder
        options["data"] = config["data"]["folder"]
    tokenizer = options.get("tokenizer")
    if tokenizer not in (None, "bytes") and not Path(tokenizer).exists():
        options["tokenizer"] = str(run.tokenizer)
    return options


def run(flags: TrainFlags) -> int:
    """Train as the flags say.

    Returns:
        Exit status: 0 when the run is finished or reached --max-minutes; 130 after SIGINT and 143 after SIGTERM, the
        numbers a shell gives to a process that such a signal ended (128 + signal), with everything saved.
    """
    from polysketch.training.requirements import check_names, check_requirements

    flags = dataclasses.replace(flags, out=_out(flags))
    launch = find_launch()
    check_names(flags.preset, _pattern(flags.attention))  # before PyTorch is loaded, as the next
    if launch.count == 1:  # several processes have to tell one another what is missing
        check_requirements(flags)
    from polysketch.training import train

    config = configuration(flags)
    is_first, began = launch.rank == 0 and is_first_run(config), time.monotonic()
    if is_first:
        print(opening(config), file=sys.stderr)
    result = train(config)
    if launch.rank == 0:
        print(_ending(result, config), file=sys.stderr)
    if is_first and result.stopped_by == "finished":
        print(longer_run(config, time.monotonic() - began), file=sys.stderr)
    if launch.rank == 0 and result.stopped_by == "finished":
        print(next_command("evaluate", result.folder), file=sys.stderr)
    return exit_status.of_result(result)


def _out(flags: TrainFlags) -> Path:
    return run_folder(flags.data) if flags.out is None else flags.out


def configuration(flags: TrainFlags) -> TrainingConfig:
    """The flags with the mechanism's options typed; where none are given, they are those of the run gone on with.

    Raises:
        ValueError: an unknown mechanism, option or type of value; the message lists those that exist.
    """
    pattern = _pattern(flags.attention)
    if flags.attention_options:
        options = _options(flags, _default(flags) if pattern is None else pattern)
    else:
        options = _options_of_the_run(flags, pattern)
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    return TrainingConfig(**{**values, "out": _out(flags), "attention": pattern, "attention_options": options})


def _options_of_the_run(flags: TrainFlags, pattern: str | tuple[str, ...] | None) -> Any:
    """The mechanism's options in the run that is gone on with, or else whose weights are taken.

    None for another mechanism.
    """
    out = _out(flags)
    folder = out if flags.resume and (out / "config.json").exists() else flags.init_from
    if folder is None:
        return {}
    from polysketch.training.run_folder import RunFolder

    known = RunFolder(folder).read_config()["training"]
    same = known.get("attention") == (list(pattern) if isinstance(pattern, tuple) else pattern)
    return known.get("attention_options", {}) if same else {}


def _default(flags: TrainFlags) -> str | tuple[str, ...]:
    """The mechanism that is used where none is given: what is learned decides."""
    from polysketch.models.answering import default_mechanism
    from polysketch.tasks import is_task, open_task

    asks = open_task(flags.data).asks if is_task(flags.data) else "next"
    return default_mechanism("each" if flags.objective == "masked" else asks, flags.preset)


def _pattern(text: str | None) -> str | tuple[str, ...] | None:
    """A name, or several with commas between."""
    return tuple(text.split(",")) if text is not None and "," in text else text


def _options(flags: TrainFlags, used: str | tuple[str, ...]) -> dict[str, Any]:
    from polysketch.nn import mixer_class

    if isinstance(used, str):
        return parse_attention_options(flags.attention_options, mixer_class(used), used)
    return parse_options_by_name(flags.attention_options, {name: mixer_class(name) for name in used})


def _ending(result: TrainingResult, config: TrainingConfig) -> str:
    ending = _ENDINGS[result.stopped_by].format(step=result.step, steps=config.steps, folder=result.folder)
    lines = [ending]
    if result.best_step not in (None, result.step):
        lines.append(f"the least validation loss was after step {result.best_step}: --checkpoint best")
    return "\n".join(lines)


_ENDINGS = {
    "finished": "finished: {steps} steps, everything is in {folder}",
    "signal": "stopped after step {step} of {steps} and saved in {folder}; the same command with --resume goes on",
    "time": "time is up after step {step} of {steps}, saved in {folder}; the same command with --resume goes on",
}
