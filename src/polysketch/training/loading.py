"""The trained model in the folder of a run."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polysketch.data import TokenizerLike, load_tokenizer
from polysketch.models import ModelConfig, TransformerLM
from polysketch.models.answering import AnsweringConfig
from polysketch.models.base import TokenModel
from polysketch.training.checkpoint import (
    BEST,
    LATEST,
    checkpoint_step,
    load_model_tensors,
    load_state,
    require_bound,
)
from polysketch.training.run_folder import (
    IDENTITY,
    RunFolder,
    find_run,
    require_own_tokenizer,
    require_text,
    task_of_run,
)
from polysketch.training.tensors import load_weights


@dataclass(frozen=True)
class RunDescription:
    """What goes with a model from a run folder.

    Attributes:
        folder: the run folder.
        checkpoint: folder of the checkpoint that was loaded.
        step: number of optimizer steps behind it.
        context_length: the context length of training.
        data: the data folder, where it was when the run started.
    """

    folder: Path
    checkpoint: Path
    step: int
    context_length: int
    data: Path

    @cached_property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer of the training data, from the copy in the run folder.

        Raises:
            ValueError: the run learned a task whose rows are ids and no text.
        """
        run = RunFolder(self.folder)
        if (task := task_of_run(run.read_config())) is not None and not run.tokenizer.exists():
            raise ValueError(f"{self.folder}: the task {task!r} is of ids and no text: it has no tokenizer")
        require_own_tokenizer(run)
        return load_tokenizer(run.tokenizer)


def load_model(
    run_dir: str | Path, *, device: torch.device | str = "cpu", checkpoint: str = "latest"
) -> tuple[TransformerLM, RunDescription]:
    """Load the model of a run, also while the run goes on; only the weights are read, and verified.

    Args:
        run_dir: the run folder.
        device: where to put the model.
        checkpoint: a checkpoint's folder name, for instance `step-00000100`, `latest`, or `best`, that of the least
            validation loss.

    Returns:
        The model in evaluation mode, in float32, and what goes with it.

    Raises:
        FileNotFoundError: no run, or no such checkpoint; the message lists those that exist.
        ValueError: the checkpoint is truncated, altered or of another configuration.
    """
    config, path, tensors = _read(run_dir, checkpoint)
    require_text(run_dir, config)
    model = TransformerLM(ModelConfig.from_dict(config["model"]))
    load_weights(model, tensors, str(path))
    return model.to(device).eval(), _described(Path(run_dir), path, config)


def load_answering_model(
    run_dir: str | Path, *, device: torch.device | str = "cpu", checkpoint: str = "latest"
) -> tuple[TokenModel, AnsweringConfig, RunDescription]:
    """Load the model of a run that learned a task (`polysketch.tasks`); arguments as for `load_model`.

    Returns:
        The model in evaluation mode, in float32; what it asks, and its sizes; and what goes with it.

    Raises:
        FileNotFoundError: no run, or no such checkpoint; the message lists those that exist.
        ValueError: the run learned text, or the checkpoint is truncated, altered or of another configuration.
    """
    config, path, tensors = _read(run_dir, checkpoint)
    if task_of_run(config) is None:
        raise ValueError(f"{run_dir}: expected a run that learned a task, found one that learned text")
    sizes = AnsweringConfig.from_dict(config["model"])
    model = sizes.build()
    load_weights(model, tensors, str(path))
    return model.to(device).eval(), sizes, _described(Path(run_dir), path, config)


def _read(run_dir: str | Path, checkpoint: str) -> tuple[dict[str, Any], Path, dict[str, Tensor]]:
    """The configuration of a run, and one of its checkpoints with its weights, verified.

    While a run goes on, the latest or the best checkpoint can be deleted as it is read; then there is another one.
    """
    while True:
        config, path = find_run(run_dir, checkpoint)
        try:
            require_bound(path, load_state(path), config.get(IDENTITY))
            tensors = load_model_tensors(path)
            _require_layers(config["model"], tensors, path)
            _require_widths(config["model"], {tuple(tensor.shape) for tensor in tensors.values()}, path)
            return config, path, tensors
        except (FileNotFoundError, ValueError):
            if checkpoint not in (LATEST, BEST) or path.is_dir():
                raise


def _require_layers(sizes: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse more layers than there can be weights for, before any is built or looked at."""
    for each in sizes.values():
        if isinstance(each, Mapping):
            _require_layers(each, tensors, path)
    count = sizes.get("num_layers", 0)
    if isinstance(count, int | float) and count > len(tensors):
        raise ValueError(
            f"{path} belongs to another model configuration: expected weights of {count:,} layers, found "
            f"{len(tensors)} tensors"
        )


def _require_widths(sizes: Mapping[str, Any], shapes: Collection[tuple[int, ...]], path: Path) -> None:
    """Refuse a vocabulary, and widths of blocks, for which there are no weights, before memory is taken for them.

    On PyTorch's meta device all shapes would be known, after two seconds of imports.
    """
    for each in sizes.values():
        if isinstance(each, Mapping):
            _require_widths(each, shapes, path)
    embedding = tuple(sizes.get(name) for name in ("vocab_size", "hidden_size"))
    if None not in embedding and "patch_size" not in sizes and embedding not in shapes:  # patches have no embedding
        found = ", ".join(map(str, sorted(shape for shape in shapes if len(shape) == 2)[:3]))
        raise ValueError(
            f"{path} belongs to another model configuration: expected an embedding of {embedding[0]} tokens in "
            f"{embedding[1]} numbers, found matrices of {found or 'no size'} and no such one"
        )
    largest = max((max(shape, default=1) for shape in shapes), default=0)
    heads, width, inner = (sizes.get(name) for name in ("num_heads", "head_dim", "feedforward_size"))
    for name, size in {"num_heads * head_dim": _product(heads, width), "feedforward_size": _product(inner)}.items():
        if size > largest:
            raise ValueError(
                f"{path} belongs to another model configuration: expected weights for {name} of {size:,}, found none "
                f"wider than {largest:,}"
            )


def _product(*sizes: Any) -> int | float:
    """0 where one is not said, or no number, which is refused elsewhere."""
    return math.prod(sizes) if all(isinstance(size, int | float) for size in sizes) else 0


def _described(run_dir: Path, checkpoint: Path, config: dict[str, Any]) -> RunDescription:
    return RunDescription(
        folder=run_dir,
        checkpoint=checkpoint,
        step=checkpoint_step(checkpoint),
        context_length=config["training"]["context"],
        data=Path(config["data"]["folder"]),
    )
