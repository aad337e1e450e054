"""One optimizer step: what decays, and the learning rate as a pure function of the step: up, then down."""

import pytest
import torch
from torch import nn

from polysketch.training.step import build_optimizer, learning_rate_at


def test_matrices_decay_and_vectors_do_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def rates(steps, warmup, peak=1.0):
    return [learning_rate_at(step, steps=steps, warmup=warmup, peak=peak) for step in range(steps)]


def test_it_rises_linearly_to_the_peak_and_falls_linearly_towards_zero():
    assert rates(8, 4, peak=0.4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (5, 0), (5, 5), (100, 10)])
def test_it_is_positive_and_reaches_the_peak_and_no_more(steps, warmup):
    found = rates(steps, warmup, peak=3e-3)
    assert min(found) > 0
    assert max(found) == pytest.approx(3e-3)
