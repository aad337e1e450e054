"""Gradients of every input and parameter are those of differences, in float64."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from attention.cases import CASES, Case, directed

LENGTH = 11  # beyond a chunk of 8 tokens and a window of 9


@pytest.mark.parametrize(("case", "causal"), directed(CASES))
def test_gradients_are_those_of_differences(case: Case, causal: bool):
    if case.not_smooth:
        pytest.skip(case.not_smooth)
    mechanism = case.build()
    inputs = case.inputs(batch=1, length=LENGTH, value_dim=3)[: 4 if "hidden_size" in case.options else 3]
    parameters = dict(mechanism.named_parameters())

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        hidden, weights = others[: len(inputs) - 3], others[len(inputs) - 3 :]
        options = {"causal": causal} | ({"hidden": hidden[0]} if hidden else {})
        return functional_call(mechanism, dict(zip(parameters, weights, strict=True)), (query, key, value), options)

    tensors = (*(x.requires_grad_() for x in inputs), *parameters.values())
    # The fast mode compares a random direction of each tensor's entries, all together.
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
