"""One optimizer step: what decays, and that options reach the optimizer and the schedule."""

import pytest
import torch
from torch import nn

from polysketch.training.muon import Muon
from polysketch.training.options import StepOptions
from polysketch.training.step import Updater, build_optimizer


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_matrices_decay_and_vectors_do_not(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.Linear(40, 40))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.5, name=name)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


class Model(nn.Linear):
    """Learns the mean of the ids."""

    def loss(self, ids):
        return (self(ids.float()) - ids.float()).square().mean()


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("muon", Muon)])
def test_the_options_choose_optimizer_and_schedule(name, kind):
    options = StepOptions(steps=10, warmup=0, learning_rate=0.1, schedule="wsd", optimizer=name)
    updater = Updater(Model(32, 32), options, torch.float32)
    assert type(updater.optimizer) is kind
    updater.compute_gradient(torch.ones(2, 32, dtype=torch.int64))
    assert [updater.apply(step) for step in (0, 7, 9)] == [0.1, 0.1, 0.05]
    assert all(group["lr"] == 0.05 for group in updater.optimizer.param_groups)
