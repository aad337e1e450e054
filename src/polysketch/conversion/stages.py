"""The stages of a conversion: what each of them trains, on which loss, how long and how fast."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.distillation import Distillation
from polysketch.conversion.transfer import AttentionTransfer, LayerTransfer
from polysketch.integrations import lora
from polysketch.integrations.language_model import HuggingFaceLM
from polysketch.integrations.replacement import replaced_mechanisms

ORIGINAL, REPLACED = "original", "replaced"
TRANSFER, DISTILLATION, TUNING = "transfer", "distillation", "tuning"


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        name: for metrics and the report.
        steps: optimizer steps.
        learning_rate: its peak.
        weight_decay: of matrices.
        begin: makes the model ready for it and returns the module to train, whose `loss(ids)` is that of windows.
    """

    name: str
    steps: int
    learning_rate: float
    weight_decay: float
    begin: Callable[[], nn.Module]


def build_stages(
    config: ConversionConfig, model: Any, teacher: Any, end_of_text: int | None = None
) -> tuple[Stage, ...]:
    """The stages that have steps, in their order.

    Args:
        config: the options.
        model: the transformers model, whose attention is replaced when the first stage begins.
        teacher: a frozen copy of it with its own attention; None where no stage asks for one.
        end_of_text: as for `HuggingFaceLM`.
    """
    decay = config.weight_decay
    stages = (
        Stage(
            TRANSFER,
            config.transfer_steps,
            config.transfer_learning_rate,
            0.0,
            begin=lambda: begin_transfer(transfer_of(model, teacher, config, end_of_text), model),
        ),
        Stage(
            DISTILLATION,
            config.distillation_steps,
            config.distillation_learning_rate,
            decay,
            begin=lambda: begin_distillation(model, teacher, config, end_of_text),
        ),
        Stage(
            TUNING,
            config.tuning_steps,
            config.learning_rate,
            decay,
            begin=lambda: begin_tuning(model, config, end_of_text),
        ),
    )
    return tuple(stage for stage in stages if stage.steps)


def transfer_of(
    model: Any, teacher: Any, config: ConversionConfig, end_of_text: int | None = None
) -> AttentionTransfer | LayerTransfer:
    """The error that attention transfer lessens, of mechanisms or of layers as the options say."""
    if config.transfer == "layers":
        return LayerTransfer(model, teacher, end_of_text=end_of_text)
    return AttentionTransfer(model, end_of_text=end_of_text)


def begin_transfer(transfer: nn.Module, model: Any) -> nn.Module:
    """Freeze all of the model but what learns in the transfer, which is returned."""
    model.eval().requires_grad_(False)
    return transfer.requires_grad_(True)


def begin_distillation(model: Any, teacher: Any, config: ConversionConfig, end_of_text: int | None = None) -> nn.Module:
    """Train what tuning trains; the loss of what it returns is the divergence from the teacher's next token."""
    _train_model(model, config)
    return Distillation(model, teacher, end_of_text=end_of_text)


def begin_tuning(model: Any, config: ConversionConfig, end_of_text: int | None = None) -> nn.Module:
    """Train the mechanisms and either all other weights or adapters; returns the module to train.

    The loss of what it returns is the cross-entropy of the next token.
    """
    _train_model(model, config)
    return HuggingFaceLM(model, end_of_text=end_of_text)


def _train_model(model: Any, config: ConversionConfig) -> None:
    """Adapters are added once, and trained on by the next stage. With them, weights of the model have other names."""
    model.train()
    if config.tuning == "all":
        model.requires_grad_(True)
    elif not lora.has_adapters(model):
        lora.add_adapters(model.requires_grad_(False), rank=config.lora_rank)
    _train_mechanisms(model)


def _train_mechanisms(model: Any) -> None:
    for mechanism in replaced_mechanisms(model).values():
        mechanism.requires_grad_(True)
