"""Tensors by name: weights of another model are refused whole, and the optimizer goes on with the same bits."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polysketch.training.step import build_optimizer
from polysketch.training.tensors import load_optimizer_tensors, load_weights, optimizer_tensors


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def with_one(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor(1), value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_one(math.nan), "expected finite weights, found NaN or infinity in 1.bias: the weights are damaged"),
        (with_one(math.inf), "expected finite weights, found NaN or infinity in 1.bias"),
        (torch.Tensor.half, "1.bias: expected torch.float32, found torch.float16"),
        (torch.Tensor.int, "1.bias: expected torch.float32, found torch.int32"),
        (lambda tensor: tensor[:2], r"1.bias: expected shape \(4,\), found \(2,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_changed(change, message):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    tensors["1.bias"] = change(tensors["1.bias"])
    with pytest.raises(ValueError, match=f"the source.*{message}"):
        load_weights(model, tensors, "the source")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_finite_weights_are_taken():
    model = make_model()
    load_weights(model, {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}, "the source")
    assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())


def make_optimizer(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    return build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1, name=name)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def make_wide_model() -> nn.Module:
    """With a matrix that is Muon's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.LayerNorm(32), nn.Linear(32, 32))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_going_on_from_the_saved_state_gives_the_same_bits(name):
    model, other = make_wide_model(), make_wide_model()
    optimizer = make_optimizer(model, name)
    for seed in range(3):
        make_step(model, optimizer, seed)
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other, name)
    load_optimizer_tensors(other, resumed, {k: v.clone() for k, v in optimizer_tensors(model, optimizer).items()})
    for seed in range(3, 6):
        make_step(model, optimizer, seed)
        make_step(other, resumed, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


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
        load_optimizer_tensors(model, make_optimizer(model), tensors)


@pytest.mark.parametrize("lost", ["2.weight/momentum", "0.weight/exp_avg", "2.bias/exp_avg_sq"])
def test_state_of_two_rules_is_complete_for_each(lost):
    model = make_wide_model()
    optimizer = make_optimizer(model, "muon")
    make_step(model, optimizer, seed=0)
    tensors = optimizer_tensors(model, optimizer)
    assert {key.rpartition("/")[2] for key in tensors} == {"momentum", "exp_avg", "exp_avg_sq", "step"}
    del tensors[lost]
    with pytest.raises(ValueError, match=r"expected optimizer state for all parameters, found none (called|for) '\d\."):
        load_optimizer_tensors(model, make_optimizer(model, "muon"), tensors)
