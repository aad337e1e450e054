"""Models of a task: what it asks decides which one."""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from polysketch.distributed.processes import Processes
from polysketch.distributed.shares import gathered
from polysketch.evaluation import measure_answers
from polysketch.models.answering import answering_config
from polysketch.models.base import TokenModel
from polysketch.storage import disk
from polysketch.tasks import Task, TaskRows, open_task, task_digest, verify_task
from polysketch.tasks.description import TASK_FILE
from polysketch.tasks.folder import TOKENIZER_FOLDER
from polysketch.tasks.masked import MaskedTokens, TaskInputs
from polysketch.training.config import TrainingConfig
from polysketch.training.goal import Goal, calibration_rows
from polysketch.training.requirements import check_task
from polysketch.training.run_folder import RunFolder
from polysketch.training.starting_weights import take_weights
from polysketch.training.step import precision
from polysketch.training.tensors import unchanged_randomness
from polysketch.training.text_goal import AROUND


class AnswersGoal(Goal):
    """A model that answers what a task asks.

    Args:
        config: the options.
        saved: those of the run that is gone on with; none for a new one.

    Attributes:
        config: the options; `context` is the length of the task's longest row.
        sizes: an `AnsweringConfig`.
        task: the task of the data folder, or to find hidden tokens in what it asks about.

    Raises:
        FileNotFoundError: a file of the task is missing.
        ValueError: an option that a task has no use for, unknown names or options, a mechanism that cannot be what the
            model asks, or no validation rows.
    """

    def __init__(self, config: TrainingConfig, saved: Mapping[str, Any]) -> None:
        self.task = self.open_task(config)
        self._taken = ""
        self.config = config = _explicit(config, saved, self.task.longest)
        self.sizes = answering_config(
            self.task.asks,
            config.preset,
            vocab_size=self.task.vocab_size,
            num_classes=self.task.num_classes,
            image_size=self.task.image_size,
            patch_size=self.task.patch_size,
            mechanism=config.attention,
            options=config.attention_options,
            num_layers=config.layers,
            projection_convolution=config.projection_convolution,
            query_key_norm=config.query_key_norm,
            head_gate=config.head_gate,
            attention_every=config.attention_every,
            input_positions=config.input_positions,
            rotary=config.rotary,
        )

    def open_task(self, config: TrainingConfig) -> Task:
        """What is learned, after a look at the options.

        Raises:
            FileNotFoundError, ValueError: as the class.
        """
        check_task(config)
        task = open_task(config.data)
        masked = config.objective == "masked"
        return MaskedTokens(TaskInputs(task), config.mask_share, config.seed) if masked else task

    def describe(self) -> dict[str, Any]:
        """The sha256 of task.json, which holds those of other files, the name of the task, and what its ids mean."""
        named = {"task": self.task.name, "alphabet": self.task.alphabet}
        return {"description_sha256": task_digest(self.config.data), "tokenizer": "none", **named}

    def verify(self) -> None:
        """As `verify_task`."""
        verify_task(self.config.data)

    def check_layers(self, model: Any, processes: Processes) -> None:
        """Refuse processes that share rows: both sides, or rows of unequal length, are not shared."""
        if processes.context is not None:
            raise ValueError(f"--mesh {processes.mesh}: rows of a task are not shared: leave context out of the mesh")

    def build_model(self) -> TokenModel:
        """As the base class has it."""
        model = self.sizes.build()
        for module in model.modules():
            if hasattr(module, "activation_checkpointing"):
                module.activation_checkpointing = self.config.activation_checkpointing
        return model

    def initialize(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Weights of another run, or the calibration of the prefix gains of a causal model."""
        config = self.config
        if config.init_from is not None:
            self._taken = take_weights(model, self.sizes, self.task, config.init_from, config.init_new)
        if hasattr(model, "calibrate") and (config.init_from is None or config.init_new):
            batch = self.rows().batch(0, calibration_rows(config))
            with precision(dtype, device):
                model.calibrate(batch.inputs["ids"].to(device))

    def rows(self) -> TaskRows:
        """As the base class has it."""
        return TaskRows(self.task, self.config.seed)

    def measure(self, model: Any, processes: Processes) -> dict[str, Any]:
        """Loss, accuracy and share of rows with every answer right, on `held_out` rows; each process asks all."""
        config = self.config
        batch_size = config.batch_size // config.accumulation  # at a time; the rows asked do not depend on it
        limit = max(config.batch_size, config.eval_tokens // self.task.longest)
        with unchanged_randomness(), gathered(model):
            return dataclasses.asdict(measure_answers(model, self.task.held_out("validation", batch_size, limit)))

    def told(self, figures: Mapping[str, Any]) -> str:
        """Loss and accuracy."""
        whole = (
            "" if figures["answers"] == figures["rows"] else f", {figures['whole_rows']:.2%} of rows without a mistake"
        )
        return f"validation loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.2%}{whole}"

    def notes(self, model: Any, rows: Any) -> Iterator[str]:
        """What is asked, and by which model it is learned."""
        count = "endless" if rows.num_rows is None else f"{rows.num_rows:,}"
        yield f"{type(model).__name__}, {count} rows of up to {self.task.longest:,} tokens; speed counts answers"
        if self._taken:
            yield f"from {self.config.init_from}: {self._taken}"

    def lay_out(self, run: RunFolder) -> None:
        """What task.json says, and the tokenizer where there is one, so that the model can be used without its task."""
        run.task.mkdir(exist_ok=True)
        disk.replace_file(run.task / TASK_FILE, (self.config.data / TASK_FILE).read_bytes())
        if (self.config.data / TOKENIZER_FOLDER).is_dir():
            shutil.copytree(self.config.data / TOKENIZER_FOLDER, run.tokenizer, dirs_exist_ok=True)


def _explicit(config: TrainingConfig, saved: Mapping[str, Any], context: int) -> TrainingConfig:
    """What was not given is as in the run that is gone on with."""
    given = {"context": context, "pack": saved.get("pack", "auto")}
    if config.attention is None and not config.attention_options and saved.get("attention") is not None:
        given |= {"attention": saved["attention"], "attention_options": saved["attention_options"]}
    for name in (*AROUND, "rotary"):
        if getattr(config, name) is None:
            given[name] = saved.get(name)
    return dataclasses.replace(config, **given)
