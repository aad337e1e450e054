"""Evaluation is for a while: a part that was in evaluation mode stays in it, and the rest trains on."""

import numpy as np
import pytest
import torch

from polysketch.evaluation import evaluate
from polysketch.generation import generate
from polysketch.models import ModelConfig, TransformerLM
from polysketch.models.modes import evaluation_mode


@pytest.fixture
def model() -> TransformerLM:
    """In training, but for the first block, which is frozen."""
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(16, 2, 32, num_heads=1, attention="linear")).train()
    model.blocks[0].eval()
    return model


def modes(model: torch.nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_everything_evaluates_inside_and_every_module_has_its_own_mode_after(model):
    before = modes(model)
    assert {True, False} == set(before)
    with evaluation_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_an_error_inside_restores_the_modes_too(model):
    before = modes(model)
    with pytest.raises(KeyboardInterrupt), evaluation_mode(model):
        raise KeyboardInterrupt
    assert modes(model) == before


@pytest.mark.parametrize("use", ["evaluate", "generate"])
def test_evaluating_and_generating_leave_mixed_modes_alone(model, use):
    before = modes(model)
    if use == "evaluate":
        evaluate(model, np.arange(64) % 16, context_length=16)
    else:
        generate(model, [[1, 2, 3]], max_new_tokens=2)
    assert modes(model) == before
