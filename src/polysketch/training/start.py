"""The start of a training process: what it will do, and whether the folder may be used, anew or to go on in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polysketch.distributed.agreement import code_digest
from polysketch.distributed.mesh import Mesh
from polysketch.distributed.processes import Processes
from polysketch.models.former import FORMAT
from polysketch.storage import disk
from polysketch.tasks import is_task
from polysketch.training.answers_goal import AnswersGoal
from polysketch.training.checkpoint import checkpoint_step, delete_leftovers, set_aside_after
from polysketch.training.config import TrainingConfig
from polysketch.training.environment import describe_environment, resolve_device, resolve_dtype
from polysketch.training.goal import Goal, facts_of
from polysketch.training.masked_goal import MaskedTextGoal
from polysketch.training.metrics_file import cut_back
from polysketch.training.options import ONLY_TO_ROUNDING, PACKED_BEFORE, as_json, check_changes, flag, identity_of
from polysketch.training.requirements import starting_checkpoint
from polysketch.training.run_folder import IDENTITY, RunFolder
from polysketch.training.text_goal import TextGoal

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """A training run's resolved options.

    Attributes:
        config: the options as given, the mechanism and its options filled in.
        goal: what is learned: the data, and the model for it.
        device: where to compute.
        dtype: precision of the matrix products.
        mesh: what several processes share; None for one.
    """

    config: TrainingConfig
    goal: Goal
    device: torch.device
    dtype: torch.dtype
    mesh: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds; JSON values."""
        return {
            "format": FORMAT,
            "training": as_json(self.config),
            "resolved": {
                "warmup": self.config.warmup_steps,
                "device": str(self.device),
                "dtype": str(self.dtype).removeprefix("torch."),
                "mesh": self.mesh,
            },
            **facts_of(self.goal, self.config.data),
            "environment": describe_environment(self.device),
        }


def make_plan(config: TrainingConfig, processes: Processes | None = None) -> Plan:
    """Resolve and check `config`.

    Args:
        config: the options.
        processes: those that compute the run, this one among them; one alone by default.

    Raises:
        FileNotFoundError: the data folder is missing or incomplete.
        ValueError: unknown names or options, sizes that do not fit, a context longer than the data, no such device.
    """
    mesh = None if processes is None or processes.alone else processes.mesh
    if mesh is not None:
        _check_shared(config, mesh)
    goal = _goal(config)
    device = resolve_device(config.device, None if processes is None else processes.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    return Plan(goal.config, goal, device, dtype, None if mesh is None else str(mesh))


def _goal(config: TrainingConfig) -> Goal:
    run = RunFolder(config.out)
    saved = _options_of(run.read_config()) if config.resume and run.has_run() else {}
    if is_task(config.data):
        return AnswersGoal(config, saved)
    return (MaskedTextGoal if config.objective == "masked" else TextGoal)(config, saved)


def _check_shared(config: TrainingConfig, mesh: Mesh) -> None:
    """Refuse options that one process alone can have."""
    if config.optimizer == "muon":
        raise ValueError(
            "--optimizer muon: expected one process, for its steps need whole matrices, which processes have only "
            "shares of: give --optimizer adamw"
        )
    if config.compile:
        raise ValueError("--compile: expected one process: leave --compile out for several")
    if config.carry_state and mesh.context > 1:
        raise ValueError(
            f"--carry-state: expected whole rows on every process, found context={mesh.context} in --mesh: processes "
            "that share a row pass its state on to one another, and to no next row"
        )
    if config.batch_size % (config.accumulation * mesh.data_size):
        sharers = "processes" if mesh.context == 1 else f"groups of {mesh.context} processes"
        raise ValueError(
            f"--batch-size: expected a multiple of {config.accumulation * mesh.data_size}, for --accumulation is "
            f"{config.accumulation} and {mesh.data_size} {sharers} have equal shares of each part, found "
            f"{config.batch_size}"
        )
    if config.context < mesh.context:
        raise ValueError(
            f"--mesh {mesh}: expected a --context of at least {mesh.context}, a token for each process that shares a "
            f"row, found {config.context}"
        )


def facts_to_agree_on(plan: Plan) -> dict[str, Any]:
    """What must be the same on all processes of a run; where folders are may differ."""
    described = plan.to_dict()
    options = {flag(name): value for name, value in described["training"].items() if name not in _OF_MACHINE}
    return {
        "the code": code_digest(),
        **options,
        "the model": described["model"],
        "the data's description": described["data"]["description_sha256"],
        "the tokenizer": described["data"]["tokenizer"],
        "the precision": described["resolved"]["dtype"],
        "PyTorch": torch.__version__,
    }


_OF_MACHINE = ("data", "tokenizer", "out", "init_from")

_EVERY = "attention_every"


def _options_of(saved: dict[str, Any]) -> dict[str, Any]:
    """The options of a run. Where it did not say which layers have the mechanism, its model does: presets have changed.

    A run that is older than this option has it in every layer. An encoder and its decoder may differ: then the preset
    says it, as it did.
    """
    options = {_EVERY: 1, **saved["training"]}
    if options[_EVERY] is None:
        sizes = saved["model"].get("sizes", saved["model"])
        parts = [sizes["encoder"], sizes["decoder"]] if "decoder" in sizes else [sizes]
        said = {part.get(_EVERY) for part in parts}
        options[_EVERY] = said.pop() if len(said) == 1 else None
    return options


def find_start(run: RunFolder, plan: Plan, say: Say) -> Path | None:
    """Where the run in the locked folder `run` starts: a checkpoint, or None for its beginning. Writes nothing.

    Args:
        run: the run folder, locked by this process.
        plan: the resolved options.
        say: gets a line for everything the user should know.

    Raises:
        ValueError: the folder holds a run and `resume` was not asked for, or other files; or an option changed that
            the result depends on.
        FileNotFoundError: the checkpoint asked for is not there.
    """
    run.require_own()
    start = starting_checkpoint(plan.config)
    if run.has_run():
        saved = run.read_config()
        _check_unchanged(saved, plan, say)
        if start is not None:
            _tell_of_warmup(saved["resolved"]["warmup"], plan.config, checkpoint_step(start), say)
    return start


def _check_unchanged(saved: dict[str, Any], plan: Plan, say: Say) -> None:
    new = plan.to_dict()
    _check_data(saved["data"], new["data"])
    notes = check_changes(TrainingConfig, {"pack": PACKED_BEFORE, **_options_of(saved)}, new["training"])
    notes += _mesh_changes(saved, new)
    notes += _environment_changes(saved["environment"], new["environment"])
    if saved["resolved"]["dtype"] != new["resolved"]["dtype"]:
        raise ValueError(
            f"--dtype: the run computes in {saved['resolved']['dtype']}, this machine would in "
            f"{new['resolved']['dtype']}; give --dtype as in the run"
        )
    if not plan.goal.is_of(saved["model"]):
        raise ValueError("the preset or the defaults of the mechanism changed since the run started: start a new run")
    for note in notes:
        say(f"note: {note}")


def _tell_of_warmup(before: int, config: TrainingConfig, step: int, say: Say) -> None:
    """Many more steps have a longer warm-up by default: the rate falls back where it had been at its peak."""
    if config.warmup is None and before <= step < config.warmup_steps:
        say(
            f"note: the warm-up is a tenth of the steps, was {before} and is now {config.warmup_steps}: the learning "
            f"rate rises once more until then; --warmup {before} leaves it at its peak"
        )


def _check_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
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


def _mesh_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line where other processes go on; an earlier run has the mesh that it had among its options."""
    before, now = saved["resolved"].get("mesh", saved["training"].get("mesh")), new["resolved"]["mesh"]
    if before == now:
        return []
    return [f"--mesh was {before} and is now {now}: {ONLY_TO_ROUNDING}"]


def _environment_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each version or machine property that changed since the run's start: it may change the rounding."""
    return [
        f"{name} was {old[name]} when the run started and is now {new.get(name)}: the result may differ by rounding"
        for name in old
        if old[name] != new.get(name)
    ]


def lay_out(run: RunFolder, plan: Plan, start: Path | None, say: Say) -> None:
    """Bring the folder to the state of `start`: configuration, tokenizer, metrics up to there, no later checkpoints.

    Every part may be interrupted and is done again by the next process: config.json comes first, so that the folder
    is recognised.
    """
    _write_config(run, plan)
    plan.goal.lay_out(run)
    if not run.checkpoints.is_dir():
        disk.make_folder(run.checkpoints)
        disk.sync(run.path)
    delete_leftovers(run.checkpoints)
    step = -1 if start is None else checkpoint_step(start)
    for path in set_aside_after(run.checkpoints, step) if start is not None else []:
        say(f"note: later checkpoint set aside as {path}")
    cut_back(run.open_metrics(), step, say)


def _write_config(run: RunFolder, plan: Plan) -> None:
    """Write what changed (only what `find_start` allows); the environment stays that of the run's start."""
    config = plan.to_dict()
    if run.has_run():
        saved = run.read_config()
        config["environment"] = saved["environment"]
        if IDENTITY in saved:
            config[IDENTITY] = saved[IDENTITY]
        if config == saved:
            return
    else:
        config[IDENTITY] = identity_of(as_json(plan.config), TrainingConfig, config["model"], config["data"])
    run.write_config(config)
