"""AdamW's groups, and its state by name."""

import pytest
import torch
from torch import nn

from polysketch.training.optimizer import (
    build_optimizer,
    load_optimizer_tensors,
    named_parameters,
    optimizer_tensors,
    plain_name,
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def make_optimizer(model: nn.Module, weight_decay: float = 0.1) -> torch.optim.AdamW:
    return build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=weight_decay)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def test_matrices_decay_and_vectors_do_not():
    model = make_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_going_on_from_the_saved_state_gives_the_same_bits():
    model, other = make_model(), make_model()
    optimizer = make_optimizer(model)
    for seed in range(3):
        make_step(model, optimizer, seed)
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other)
    load_optimizer_tensors(other, resumed, {k: v.clone() for k, v in optimizer_tensors(model, optimizer).items()})
    for seed in range(3, 6):
        make_step(model, optimizer, seed)
        make_step(other, resumed, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_names_are_free_of_the_prefixes_of_wrappers():
    assert plain_name("_orig_mod.module.blocks.0._orig_mod.weight") == "blocks.0.weight"
    assert plain_name("submodule.weight") == "submodule.weight"
    model = make_model()
    compiled = torch.compile(model, backend="eager")  # wraps at once, compiles only when called
    assert [name for name, _ in named_parameters(compiled)] == [name for name, _ in model.named_parameters()]


def test_state_of_another_model_is_refused_by_name():
    model = make_model()
    optimizer = make_optimizer(model)
    with pytest.raises(ValueError, match=r"'9\.weight', which the model does not have"):
        load_optimizer_tensors(model, optimizer, {"9.weight/exp_avg": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'0.weight/exp_avg': expected shape \(4, 3\), found \(3, 4\)"):
        load_optimizer_tensors(model, optimizer, {"0.weight/exp_avg": torch.zeros(3, 4)})


def test_state_that_lacks_a_field_of_a_parameter_is_refused_by_name():
    model = make_model()
    optimizer = make_optimizer(model)
    make_step(model, optimizer, seed=0)
    tensors = optimizer_tensors(model, optimizer)
    del tensors["2.bias/exp_avg_sq"]
    with pytest.raises(ValueError, match=r"for all parameters, found none called '2\.bias/exp_avg_sq'"):
        load_optimizer_tensors(make_model(), make_optimizer(make_model()), tensors)
