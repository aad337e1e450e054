"""May a run go on with these options? A table says which may change, and what that means."""

from collections.abc import Mapping
from typing import Any

from polysketch.training.config import flag

FREE = {
    "out": "the folder may have moved",
    "data": "the folder may have moved; what is in it is compared by its sha256",
    "resume": "it is what brought us here",
    "checkpoint": "it says where to go on from",
    "extend": "it allows another number of steps",
    "init_from": "it only matters before the first step",
    "log_every": "metrics only",
    "eval_every": "metrics only",
    "eval_tokens": "metrics only",
    "save_every": "checkpoints only",
    "keep": "checkpoints only",
    "max_minutes": "a stop and a resume change nothing",
    "tensorboard": "metrics only",
}
"""Options that may change because they leave the computation as it is, with the reason."""

ROUNDING = ("device", "threads", "accumulation", "activation_checkpointing")
"""Options that may change, and that change the result by rounding alone: the user is told."""


def check_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the options of a run with those it is to go on with.

    Args:
        old: `training` of the run's config.json.
        new: the same of the new command line.

    Returns:
        A line for each option whose change alters the rounding, for the user.

    Raises:
        ValueError: an option changed that the result depends on; all of them are named with old and new value.
    """
    changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} - FREE.keys()
    refused = sorted(name for name in changed if name not in ROUNDING and not _may_extend(name, old, new))
    if refused:
        listed = ", ".join(f"{flag(name)} was {old.get(name)} and is now {new.get(name)}" for name in refused)
        raise ValueError(f"the run cannot be resumed with changed options: {listed}; {_advice(refused)}")
    return [
        f"{flag(name)} was {old[name]} and is now {new[name]}: the result agrees with an unchanged run only to rounding"
        for name in sorted(changed & set(ROUNDING))
    ]


def _may_extend(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """More steps are allowed when asked for, and with them another warm-up."""
    return bool(new["extend"]) and name in ("steps", "warmup") and new["steps"] > old["steps"]


def _advice(refused: list[str]) -> str:
    if refused == ["steps"]:
        return "give --extend for more steps (fewer are not possible)"
    return "give the old values, or start a new run (--init-from takes over the weights)"


def check_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on with other data than the run was started with.

    Raises:
        ValueError: the sha256 of the data's description differs.
    """
    if old["description_sha256"] != new["description_sha256"]:
        raise ValueError(
            f"--data: expected the data the run was started with (description.json with sha256 "
            f"{old['description_sha256'][:12]}..., at the time in {old['folder']}), found {new['folder']} with "
            f"{new['description_sha256'][:12]}...: it was prepared again or is another folder"
        )


def environment_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each version or machine property that changed since the run's start: it may change the rounding."""
    return [
        f"{name} was {old[name]} when the run started and is now {new.get(name)}: the result may differ by rounding"
        for name in old
        if old[name] != new.get(name)
    ]
