"""Options of a run: what every run has, how an option is declared, and whether a run may go on with changed ones."""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

PACKED_BEFORE = "windows"
"""What rows hold in runs that do not say."""

ONLY_TO_ROUNDING = "the result agrees with an unchanged run only to rounding"
_MOST = 2**31 - 1  # absurd for every option with a least value, and a number that every library can hold


class OnResume(enum.Enum):
    """What it means for a run that is gone on with when an option has changed since."""

    REFUSED = "the result depends on it"
    FREE = "the result does not depend on it, or what it names is compared by its content"
    ROUNDING = "the result changes by rounding alone: the user is told"
    EXTENDING = "allowed with `extend`, for more steps than before"


def option(
    default: Any = dataclasses.MISSING,
    *,
    on_resume: OnResume,
    least: float | None = None,
    positive: bool = False,
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """Declare an option: a dataclass field that knows its range and what its change means.

    Args:
        default: its value where none is given; without one, and without `default_factory`, it must be given.
        on_resume: what a change means for a run that is gone on with.
        least: smallest value; such an option is refused above 2^31 - 1 as well.
        positive: refuse what is not finite and above 0.
        default_factory: makes the default, as in `dataclasses.field`.
    """
    metadata = {"on_resume": on_resume, "least": least, "positive": positive}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run.

    What the loop needs to know, be it training or the conversion of a model.
    """

    data: Path = option(on_resume=OnResume.FREE)  # the folder may have moved: its sha256 is compared
    """Folder that `polysketch prepare` made: the text to train on, and its tokenizer."""

    out: Path = option(on_resume=OnResume.FREE)
    """Folder to create; everything about the run goes there."""

    resume: bool = option(False, on_resume=OnResume.FREE)
    """Go on from the last checkpoint in the folder, with the same result as if the run had never stopped. Starts
    anew when the folder is empty, so the same command line can be repeated until the run is done."""

    context: int = option(2048, on_resume=OnResume.REFUSED, least=1)
    """Context length: the number of tokens in a window, or in a row of documents."""

    batch_size: int = option(4, on_resume=OnResume.REFUSED, least=1)
    """Number of windows or rows of documents in one optimizer step."""

    accumulation: int = option(1, on_resume=OnResume.ROUNDING, least=1)
    """Compute each batch in this many parts, one after the other. Needs less memory; the result is the same up to
    rounding. Must divide the batch size."""

    clip: float = option(1.0, on_resume=OnResume.REFUSED, positive=True)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""

    seed: int = option(0, on_resume=OnResume.REFUSED)
    """Seed of the initial weights and of the order of the data."""

    device: str = option("auto", on_resume=OnResume.ROUNDING)
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", on_resume=OnResume.REFUSED)
    """Precision of the matrix products in training; weights and sums stay float32. auto is bfloat16 on a GPU, float32
    elsewhere."""

    log_every: int = option(10, on_resume=OnResume.FREE, least=1)
    """Write a line of metrics every so many steps."""

    eval_tokens: int = option(65_536, on_resume=OnResume.FREE, least=1)
    """Number of validation tokens of an evaluation."""

    save_every: int = option(100, on_resume=OnResume.FREE, least=1)
    """Save a checkpoint every so many steps; one is always saved at the start and at the end."""

    keep: int = option(2, on_resume=OnResume.FREE, least=1)
    """Number of checkpoints to keep; older ones are deleted once a newer one is complete."""

    max_minutes: float | None = option(None, on_resume=OnResume.FREE, positive=True)
    """Save and stop after this many minutes of this process; go on later with --resume."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _plain(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_kind(field, value)
            _check_range(field, value)
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed: expected a number of 64 bits, found {self.seed}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"--accumulation: expected a divisor of the batch size {self.batch_size}, found {self.accumulation}"
            )


_SCALARS: dict[type, tuple[str, type]] = {
    bool: ("True or False", bool),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a text", str),
}
"""How a kind of value is called, and what counts as one."""


def _kinds(field: dataclasses.Field) -> tuple[Any, ...]:
    """The types that a field may have; none where it is declared by a text alone."""
    if isinstance(field.type, str):
        return ()
    return get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)


def _plain(field: dataclasses.Field, value: Any) -> Any:
    """A path for the text of one, and Python's own numbers for those of another library, which JSON has not."""
    if isinstance(value, str) and Path in _kinds(field):
        return Path(value)
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _check_kind(field: dataclasses.Field, value: Any) -> None:
    """Refuse a text where none is expected, and where numbers and texts alone are expected what is neither."""
    kinds = [kind for kind in _kinds(field) if kind is not NoneType]
    scalars = [kind for kind in kinds if kind in _SCALARS]
    if not kinds or (value is None and NoneType in _kinds(field)):
        return
    if isinstance(value, str):
        fits = str in kinds or any(kind is Path or get_origin(kind) is Literal for kind in kinds)
    else:
        fits = len(scalars) < len(kinds) or any(_is_of(value, kind) for kind in scalars)
    if not fits:
        expected = " or ".join(_SCALARS[kind][0] for kind in scalars) or "options by name, or several values"
        raise TypeError(f"{flag(field.name)}: expected {expected}, found {value!r}")


def _is_of(value: Any, kind: type) -> bool:
    return isinstance(value, _SCALARS[kind][1]) and (kind is bool or not isinstance(value, bool))


def _check_range(field: dataclasses.Field, value: Any) -> None:
    least, positive = field.metadata.get("least"), field.metadata.get("positive")
    if get_origin(field.type) is Literal and value not in get_args(field.type):
        expected = ", ".join(map(str, get_args(field.type)))
        raise ValueError(f"{flag(field.name)}: expected one of {expected}, found {value!r}")
    if value is None:
        return
    if least is not None and not value >= least:  # `not >=` also catches nan
        raise ValueError(f"{flag(field.name)}: expected at least {least}, found {value}")
    if least is not None and value > _MOST:
        raise ValueError(f"{flag(field.name)}: expected at most {_MOST}, found {value}")
    if positive and not 0 < value < float("inf"):
        raise ValueError(f"{flag(field.name)}: expected a finite number above 0, found {value}")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the optimizer steps of a run, or of one of its stages, need to know.

    Attributes:
        steps: number of steps.
        warmup: steps over which the learning rate rises; at most `steps`.
        learning_rate: its peak.
        schedule: of the learning rate, see `learning_rate_at`.
        optimizer: "adamw" or "muon".
        betas: decay rates of AdamW's two running moments.
        weight_decay: of matrices.
        clip: largest norm of the gradient.
        accumulation: parts in which a batch is computed.
        compile: whether to compile the loss.
    """

    steps: int
    warmup: int
    learning_rate: float
    schedule: str = "linear"
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulation: int = 1
    compile: bool = False


def flag(name: str) -> str:
    """The command-line flag of an option, for messages."""
    return "--" + name.replace("_", "-")


def as_json(options: RunOptions) -> dict[str, Any]:
    """The options as JSON values, in the form they have after a round trip through JSON."""
    return {field.name: _json_value(getattr(options, field.name)) for field in dataclasses.fields(options)}


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else json.loads(json.dumps(value, default=dict))


def identity_of(options: Mapping[str, Any], kind: type[RunOptions], *facts: Mapping[str, Any]) -> str:
    """What tells a run from others: sha256 of all that its result depends on, wherever its folder and its data lie.

    Args:
        options: as `as_json` gives them.
        kind: their class, whose fields say what depends on them.
        facts: what else counts; JSON values.
    """
    deciding = {
        f.name: options[f.name] for f in dataclasses.fields(kind) if f.metadata["on_resume"] is OnResume.REFUSED
    }
    others = [{name: value for name, value in each.items() if name != "folder"} for each in facts]
    return hashlib.sha256(json.dumps([deciding, *others], sort_keys=True).encode()).hexdigest()[:32]


def check_changes(kind: type[RunOptions], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the options of a run with those it is to go on with.

    Args:
        kind: the class of the options, whose fields say what a change of them means.
        old: the options in the run's config.json, as `as_json` gave them. One that is newer than the run has its
            default.
        new: the same of the new command line.

    Returns:
        A line for each option whose change alters the rounding, for the user.

    Raises:
        ValueError: an option changed that the result depends on; all of them are named with old and new value.
    """
    meaning = {field.name: field.metadata["on_resume"] for field in dataclasses.fields(kind)}
    old = {**_defaults(kind, new.keys() - old.keys()), **old}
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    allowed = {OnResume.FREE, OnResume.ROUNDING} | ({OnResume.EXTENDING} if _extends(old, new) else set())
    refused = [name for name in changed if meaning.get(name) not in allowed]
    if refused:
        listed = ", ".join(f"{flag(name)} was {old.get(name)} and is now {new.get(name)}" for name in refused)
        raise ValueError(f"the run cannot be resumed with changed options: {listed}; {_advice(refused, meaning)}")
    return [
        f"{flag(name)} was {old[name]} and is now {new[name]}: {ONLY_TO_ROUNDING}"
        for name in changed
        if meaning[name] is OnResume.ROUNDING
    ]


def _defaults(kind: type[RunOptions], names: Collection[str]) -> dict[str, Any]:
    """The defaults of those of the options that have one, as JSON values."""
    fields = [field for field in dataclasses.fields(kind) if field.name in names]
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {name: _json_value(value) for name, value in {**made, **given}.items()}


def _extends(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return bool(new.get("extend")) and new["steps"] > old["steps"]


def _advice(refused: list[str], meaning: Mapping[str, OnResume]) -> str:
    if refused == ["steps"] and meaning["steps"] is OnResume.EXTENDING:
        return "give --extend with more steps than before (fewer are not possible)"
    weights = " (--init-from takes over the weights)" if "init_from" in meaning else ""
    return f"give the old values, or start a new run{weights}"
