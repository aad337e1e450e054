"""What a run will do: every option resolved and checked before anything is written."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polysketch import models
from polysketch.data import PreparedData
from polysketch.training.config import TrainingConfig
from polysketch.training.environment import describe_environment, resolve_device, resolve_dtype


@dataclass(frozen=True)
class Plan:
    """A training run's resolved options.

    Attributes:
        config: the options as given, the mechanism and its options filled in.
        data: the opened data folder.
        model: configuration of the model; its vocabulary is the data's.
        device: where to compute.
        dtype: precision of the matrix products.
    """

    config: TrainingConfig
    data: PreparedData
    model: models.ModelConfig
    device: torch.device
    dtype: torch.dtype

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds; JSON values."""
        return {
            "format": 1,
            "training": options_dict(self.config),
            "resolved": {
                "warmup": self.config.warmup_steps,
                "device": str(self.device),
                "dtype": str(self.dtype).removeprefix("torch."),
            },
            "model": self.model.to_dict(),
            "data": describe_data(self.config.data, self.data),
            "environment": describe_environment(self.device),
        }


def make_plan(config: TrainingConfig) -> Plan:
    """Resolve and check `config`.

    Raises:
        FileNotFoundError: the data folder is missing or incomplete.
        ValueError: unknown names or options, sizes that do not fit, a context longer than the data, no such device.
    """
    config = _with_attention(config)
    build_model_config(config)  # what no data can mend is refused before any is read
    data = PreparedData.open(config.data)
    device = resolve_device(config.device)
    _check_splits(config, data)
    model = build_model_config(config, vocab_size=data.tokenizer.vocab_size)
    return Plan(config, data, model, device, resolve_dtype(config.dtype, device))


def build_model_config(config: TrainingConfig, **changes: Any) -> models.ModelConfig:
    """The preset with the run's mechanism, its options, the number of layers, and further changes."""
    if config.layers is not None:
        changes["num_layers"] = config.layers
    return models.preset(
        config.preset, attention=config.attention, attention_options=config.attention_options, **changes
    )


def _with_attention(config: TrainingConfig) -> TrainingConfig:
    """The run's mechanism and options filled in from the preset, so that a saved run says what it is."""
    if config.attention is not None:
        return config
    attention, options = models.preset_attention(config.preset, config.attention_options)
    return dataclasses.replace(config, attention=attention, attention_options=options)


def options_dict(config: TrainingConfig) -> dict[str, Any]:
    """The fields of `config` as JSON values, in the form they have after a round trip through JSON."""
    return {field.name: _json_value(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _json_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return json.loads(json.dumps(value, default=dict))


def describe_data(folder: Path, data: PreparedData) -> dict[str, Any]:
    """Where the data is, and the sha256 of its description (which holds those of the token files)."""
    description = (folder / "description.json").read_bytes()
    return {
        "folder": str(folder.resolve()),
        "description_sha256": hashlib.sha256(description).hexdigest(),
        "tokenizer": data.tokenizer.name,
    }


def _check_splits(config: TrainingConfig, data: PreparedData) -> None:
    if config.eval_every and "validation" not in data.description.splits:
        raise ValueError(
            f"--data: expected a validation split in {config.data}, found {', '.join(data.description.splits)}: "
            "prepare the data with one, or train without evaluation by --eval-every 0"
        )
    found = data.split("train").num_tokens
    if found < config.context + 1:
        raise ValueError(
            f"--context {config.context}: expected at least {config.context + 1} training tokens in {config.data}, "
            f"found {found}: choose a shorter context or prepare more text"
        )
