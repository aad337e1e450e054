"""The stages of a conversion: what each of them trains, and what is measured before, between and after them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.measure import measure, transfer_error
from polysketch.conversion.transfer import AttentionTransfer
from polysketch.data import PreparedData, TrainingWindows
from polysketch.integrations import lora
from polysketch.integrations.language_model import HuggingFaceLM
from polysketch.integrations.replacement import replace_attention, replaced_mechanisms, restore_attention
from polysketch.training.environment import resolve_dtype
from polysketch.training.loop import Task
from polysketch.training.options import StepOptions
from polysketch.training.reporting import Reporter
from polysketch.training.step import Updater
from polysketch.training.tensors import seed_everything, unchanged_randomness

ORIGINAL, REPLACED, TRANSFER, TUNING = "original", "replaced", "transfer", "tuning"


class ConversionTask(Task):
    """Attention transfer, then fine-tuning, measured before, between and after.

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

    advice = "start anew with a lower --learning-rate or --transfer-learning-rate"

    def __init__(self, config: ConversionConfig, model: Any, data: PreparedData, reporter: Reporter) -> None:
        self.windows = TrainingWindows(data.split("train").tokens, config.context, config.seed)
        self.ends = (config.transfer_steps, config.steps)
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
            **self._config.attention_options,
        )

    @torch.no_grad()
    def _try(self) -> None:
        """Replace attention, read one window as in training and restore it."""
        self._replace()
        self._require_something_to_transfer()
        self._model.train(self._config.tuning_steps > 0)
        window = self.windows.window(0)[None, :-1]
        self._model.base_model(input_ids=window.to(self._model.device), use_cache=False)
        restore_attention(self._model).eval()

    def _require_something_to_transfer(self) -> None:
        mechanisms = replaced_mechanisms(self._model).values()
        if self._config.transfer_steps and not any(True for each in mechanisms for _ in each.parameters()):
            raise ValueError(
                f"attention mechanism {self._config.attention!r} has no parameters that attention transfer could "
                "train: leave the stage out by --transfer-steps 0"
            )

    def enter(self, step: int) -> None:
        """Begin the stage that step number `step` (from 0) belongs to, with an optimizer of its own."""
        config = self._config
        transfers = step < config.transfer_steps or not config.tuning_steps
        self.stage = TRANSFER if transfers else TUNING
        self.first_step = 0 if transfers else config.transfer_steps
        trained = begin_transfer(self._model) if transfers else begin_tuning(self._model, config)
        self._model.train(not transfers)
        steps = config.transfer_steps if transfers else config.tuning_steps
        options = StepOptions(
            steps=steps,
            warmup=steps // 10,
            learning_rate=config.transfer_learning_rate if transfers else config.learning_rate,
            weight_decay=0.0 if transfers else config.weight_decay,
            clip=config.clip,
            accumulation=config.accumulation,
        )
        self.updater = Updater(trained, options, resolve_dtype(config.dtype, next(self._model.parameters()).device))

    def end_step(self, step: int, reporter: Reporter) -> None:
        """At the end of a stage, measure the model and begin the next stage."""
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
                figures["transfer_error"] = transfer_error(self._model, self._data, self._config)
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
        config = self._config
        over = [TRANSFER] if 0 < config.transfer_steps <= step else []
        over += [TUNING] if config.tuning_steps and step == config.steps else []
        missing = [stage for stage in over if stage not in self.figures()]
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


def begin_transfer(model: Any) -> nn.Module:
    """Freeze all but the mechanisms; returns the module to train, whose loss is their error."""
    model.requires_grad_(False)
    for mechanism in replaced_mechanisms(model).values():
        mechanism.requires_grad_(True)
    return AttentionTransfer(model)


def begin_tuning(model: Any, config: ConversionConfig) -> nn.Module:
    """Train the mechanisms and either all other weights or adapters; returns the module to train.

    The loss of what it returns is the cross-entropy of the next token. With adapters, these are new, and the model's
    weights go by other names from now on.
    """
    model.requires_grad_(config.tuning == "all")
    if config.tuning == "lora":
        lora.add_adapters(model, rank=config.lora_rank)
    for mechanism in replaced_mechanisms(model).values():
        mechanism.requires_grad_(True)
    return HuggingFaceLM(model)


def end_tuning(model: Any, config: ConversionConfig) -> None:
    """Merge adapters, if there are any, into the weights."""
    if config.tuning == "lora" and config.tuning_steps:
        lora.merge_adapters(model)


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
