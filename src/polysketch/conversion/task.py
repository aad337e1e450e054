"""A conversion as the loop sees it: one stage after the other, measured before, between and after them."""

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.distillation import frozen_copy
from polysketch.conversion.measure import measure, transfer_error
from polysketch.conversion.stages import ORIGINAL, REPLACED, TRANSFER, TUNING, build_stages, transfer_of
from polysketch.conversion.window_dropout import WindowDropout
from polysketch.data import PreparedData, TrainingWindows
from polysketch.integrations.language_model import read_rows, require_documents_apart
from polysketch.integrations.replacement import replace_attention, replaced_mechanisms, restore_attention
from polysketch.training.environment import resolve_dtype
from polysketch.training.loop import Task
from polysketch.training.options import StepOptions
from polysketch.training.reporting import Reporter
from polysketch.training.step import Updater
from polysketch.training.tensors import seed_everything, unchanged_randomness


class ConversionTask(Task):
    """Attention transfer, then distillation, then fine-tuning, measured before, between and after.

    What decides how a conversion goes on is the step, the tensors that are trained, the optimizer of the current stage
    and the random states: they are in a checkpoint. The rest of the model comes from its folder again. What was
    measured is in metrics.jsonl alone, which a resumed process reads.

    Args:
        config: the options.
        model: the transformers model, on its device, with its own attention still.
        data: the prepared text.
        reporter: told of everything.

    Attributes:
        windows: of the training text.
    """

    advice = "start anew with a lower --transfer-learning-rate, --distillation-learning-rate or --learning-rate"

    def __init__(self, config: ConversionConfig, model: Any, data: PreparedData, reporter: Reporter) -> None:
        self.windows = TrainingWindows(data.split("train").tokens, config.context, config.seed)
        self._teacher = frozen_copy(model) if config.needs_teacher else None
        self._end_of_text = data.description.end_of_text if config.pack == "documents" else None
        self._stages = build_stages(config, model, self._teacher, self._end_of_text)
        self.ends = tuple(itertools.accumulate(stage.steps for stage in self._stages))
        self._config, self._model, self._data, self._reporter = config, model, data, reporter

    def replace_and_measure(self) -> None:
        """Measure the model, replace its attention and measure again; what is refused is refused before that."""
        self._try()
        self._measure(ORIGINAL, step=0)
        self._replace()
        self._measure(REPLACED, step=0)

    def _replace(self) -> None:
        seed_everything(self._config.seed)
        replace_attention(
            self._model,
            self._config.attention,
            layers=self._config.layers,
            dropout=self._config.dropout,
            sliding_window=self._config.sliding_window,
            softcap=self._config.softcap,
            **self._config.attention_options,
        )

    @torch.no_grad()
    def _try(self) -> None:
        """Replace attention, read one window as in training and restore it."""
        require_documents_apart(self._model, self._end_of_text)
        self._replace()
        require_documents_apart(self._model, self._end_of_text)
        self._require_something_to_transfer()
        WindowDropout(self._model, self._config.window_dropout, self._config.seed)  # refuses where there is no window
        self._model.train(self._config.steps > self._config.transfer_steps)  # the later stages train all of it
        window = self.windows.window(0)[None, :-1].to(self._model.device)
        next(read_rows(self._model, window, self._end_of_text))
        restore_attention(self._model).eval()

    def _require_something_to_transfer(self) -> None:
        mechanisms = replaced_mechanisms(self._model).values()
        if self._config.transfer == "layers":
            return
        if self._config.transfer_steps and not any(True for each in mechanisms for _ in each.parameters()):
            raise ValueError(
                f"attention mechanism {self._config.attention!r} has no parameters that attention transfer could "
                "train: leave the stage out by --transfer-steps 0, or train whole layers by --transfer layers"
            )

    def enter(self, step: int) -> None:
        """Begin the stage that step number `step` (from 0) belongs to, with an optimizer of its own."""
        config = self._config
        index = min(bisect.bisect(self.ends, step), len(self.ends) - 1)
        stage = self._stages[index]
        self.stage, self.first_step, self._stage_steps = stage.name, self.ends[index] - stage.steps, stage.steps
        options = StepOptions(
            steps=stage.steps,
            warmup=stage.steps // 10,
            learning_rate=stage.learning_rate,
            weight_decay=stage.weight_decay,
            clip=config.clip,
            accumulation=config.accumulation,
        )
        dtype = resolve_dtype(config.dtype, next(self._model.parameters()).device)
        self._window_dropout = WindowDropout(self._model, config.window_dropout, config.seed)
        self.updater = Updater(stage.begin(), options, dtype)

    def begin_step(self, step: int) -> None:
        """Draw random features anew where the mechanism does, and drop windows where the options say so."""
        for mechanism in replaced_mechanisms(self._model).values():
            mechanism.redraw(step)
        if self.stage != TUNING:
            self._window_dropout.begin_step(step, (step - self.first_step) / self._stage_steps)

    def end_step(self, step: int, reporter: Reporter) -> None:
        """At the end of a stage, measure the model and begin the next stage."""
        self._window_dropout.end_step()
        if step in self.ends:
            self._measure(self.stage, step)
            if step < self._config.steps:
                self.enter(step)

    def _measure(self, stage: str, step: int) -> None:
        if stage in self.figures():
            return
        with unchanged_randomness():
            figures = measure(self._model, self._data, self._config)
            if stage in (REPLACED, TRANSFER):
                transfer = transfer_of(self._model, self._teacher, self._config, self._end_of_text)
                figures["transfer_error"] = transfer_error(transfer, self._model, self._data, self._config)
        self._reporter.write({"kind": "evaluation", "step": step, "stage": stage} | figures)
        self._reporter.say(f"{stage}: perplexity {figures['perplexity']:.3f} (loss {figures['loss']:.4f})")

    def figures(self) -> dict[str, dict[str, Any]]:
        """What was measured: `original`, `replaced`, and the stages that are over."""
        lines = self._reporter.metrics.read()
        return {line["stage"]: line for line in lines if line["kind"] == "evaluation"}

    def require_figures(self, step: int) -> None:
        """Refuse to go on after `step` steps without what was measured: it cannot be measured again later.

        Raises:
            ValueError: the measurements of a stage that is over are missing.
        """
        over = [stage.name for stage, end in zip(self._stages, self.ends, strict=True) if end <= step]
        missing = [name for name in over if name not in self.figures()]
        if missing:
            raise ValueError(
                f"{self._reporter.metrics.path}: expected what was measured after {', '.join(missing)}, found nothing: "
                "the file was cut short or deleted; start a new conversion"
            )

    def tensors(self) -> Mapping[str, Tensor]:
        """See `changed_tensors`."""
        return changed_tensors(self._model)

    def load(self, step: int, tensors: Mapping[str, Tensor], source: str) -> None:
        """Enter the stage of the step, and put them back."""
        self.enter(step)
        load_changed_tensors(self._model, tensors, source)


def changed_tensors(model: Any) -> dict[str, Tensor]:
    """What a checkpoint has to hold: all that is trained, and the mechanisms' random weights; each tensor once."""
    return dict(_changed(model))


def _changed(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():  # a tied parameter comes once
        if parameter.requires_grad:
            yield name, parameter
    for layer, mechanism in replaced_mechanisms(model).items():
        saved = mechanism.state_dict()
        yield from ((f"buffer/{layer}/{name}", saved[name]) for name, _ in mechanism.named_buffers() if name in saved)


@torch.no_grad()
def load_changed_tensors(model: Any, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put back what `changed_tensors` gave at the same stage.

    Raises:
        ValueError: they are of another stage or another model.
    """
    own = changed_tensors(model)
    if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
        raise ValueError(f"{source} belongs to another model or other options: its tensors differ in name or shape")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
