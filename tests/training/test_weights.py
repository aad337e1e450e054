"""Putting weights into a model: all of them, of its shapes and types, finite, or nothing is changed."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polysketch.training.weights import load_weights, model_tensors


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


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
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    tensors["1.bias"] = change(tensors["1.bias"])
    with pytest.raises(ValueError, match=f"the source.*{message}"):
        load_weights(model, tensors, "the source")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model_tensors(model).items())


def test_finite_weights_are_taken():
    model = make_model()
    load_weights(model, {name: torch.ones_like(tensor) for name, tensor in model_tensors(model).items()}, "the source")
    assert all(bool((tensor == 1).all()) for tensor in model_tensors(model).values())
