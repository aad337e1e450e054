"""Adapters of low rank (LoRA, Hu et al. 2021, by peft) at the projections around replaced attention."""

from typing import Any

from torch import nn

from polysketch.attention import Mechanism
from polysketch.extras import require
from polysketch.integrations.replacement.bookkeeping import SUBMODULE


def add_adapters(model: Any, *, rank: int) -> None:
    """Put an adapter at every linear projection of the attention layers that were replaced; only they are trained.

    Args:
        model: a transformers model with replaced attention; changed in place.
        rank: rank of the adapters; they are scaled by 2 as is the custom (alpha = 2 rank), and start at zero.

    Raises:
        ImportError: peft is not installed; the message has the pip command.
    """
    peft = require("peft")
    names = _projections(model)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=names,
        bias="none",
        fan_in_fan_out=not isinstance(model.get_submodule(names[0]), nn.Linear),  # GPT-2's Conv1D holds its transpose
    )
    peft.inject_adapter_in_model(config, model)


def has_adapters(model: Any) -> bool:
    """Whether `add_adapters` was called, and `merge_adapters` not since."""
    return hasattr(model, "peft_config")


def merge_adapters(model: Any) -> None:
    """Add what the adapters learned to the projections, and remove them; nothing happens where there are none."""
    if not has_adapters(model):
        return
    tuners = require("peft.tuners.lora")
    for name, module in list(model.named_modules()):
        if isinstance(module, tuners.LoraLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    del model.peft_config


def _projections(model: Any) -> list[str]:
    """Names of the linear modules directly in the attention layers whose attention was replaced."""
    return [
        f"{name}.{child}"
        for name, module in model.named_modules()
        if isinstance(getattr(module, SUBMODULE, None), Mechanism)
        for child, part in module.named_children()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    ]
