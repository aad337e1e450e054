"""What a run folder tells about a model: its sizes, its training and what was measured, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polysketch.data import DataDescription
from polysketch.data.description import DESCRIPTION_FILE
from polysketch.models import TransformerLM
from polysketch.models.base import TokenModel
from polysketch.models.fingerprint import weights_sha256
from polysketch.training.loading import RunDescription
from polysketch.training.run_folder import RunFolder

FORMAT = 1
_STATE_TOKENS = (1, 257)


def run_facts(model: TransformerLM, description: RunDescription) -> dict[str, Any]:
    """What goes with the weights: for the model card, and for the way back into a run folder.

    Args:
        model: of a run.
        description: that came with it.

    Returns:
        JSON values. Of folders, only the names: an exported model says nothing about the machine it comes from.
    """
    run = RunFolder(description.folder)
    config = run.read_config()
    data = DataDescription.read(run.tokenizer / DESCRIPTION_FILE)
    return {
        **_facts_of_any(model, description, config),
        "state_bytes": state_bytes(model),
        "data": {
            "name": description.data.name,
            "description_sha256": config["data"]["description_sha256"],
            "sources": [Path(source).name for source in data.sources],
            "splits": {name: split.to_dict() for name, split in data.splits.items()},
            "dtype": data.dtype,
        },
        "tokenizer": dataclasses.asdict(data.tokenizer),
    }


def task_facts(model: TokenModel, description: RunDescription) -> dict[str, Any]:
    """As `run_facts`, of the run of a task: its name in place of the data, and no tokenizer."""
    config = RunFolder(description.folder).read_config()
    data = {name: config["data"][name] for name in ("task", "description_sha256")}
    return {**_facts_of_any(model, description, config), "data": data}


def _facts_of_any(model: TokenModel, description: RunDescription, config: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of every run."""
    metrics = RunFolder(description.folder).open_metrics()
    return {
        "format": FORMAT,
        "step": description.step,
        "weights_sha256": weights_sha256(model),
        "parameters": model.num_parameters(),
        "training": _without_folders(config["training"]),
        "environment": config["environment"],
        "metrics": _last_metrics(metrics.read(), description.step),
    }


def state_bytes(model: TransformerLM) -> int | None:
    """Bytes of the state of one sequence; None where it grows with the sequence."""
    found = set()
    for length in _STATE_TOKENS:
        state = model.init_state(1)
        model.extend_hidden(torch.zeros(1, length, dtype=torch.int64, device=model.output_bias.device), state)
        found.add(state.nbytes)
    return found.pop() if len(found) == 1 else None


def _without_folders(training: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in training.items() if name not in ("data", "out", "init_from")}


def _last_metrics(lines: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Kind -> the last line of that kind up to `step`."""
    return {line["kind"]: line for line in lines if line["step"] <= step and "kind" in line}
