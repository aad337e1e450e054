"""Forward-mode derivatives of every mechanism are those that backward gives, or are refused."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from attention.cases import CASES, Case, marks_of
from polysketch import attention

# PyTorch's own, as it reads its formulas of forward mode for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")

RUNS = [
    pytest.param(case, causal, id=f"{case} causal={causal}", marks=marks_of(case))
    for case in CASES
    for causal in (True, False)
]


def products(case: Case, causal: bool) -> tuple[Tensor, Tensor]:
    """u . J t by forward mode, and by backward, for random t and u."""
    mechanism = case.build()
    inputs = case.inputs(batch=1, length=19, value_dim=3)[: 4 if "hidden_size" in case.options else 3]
    parameters = dict(mechanism.named_parameters())

    def attend(*tensors: Tensor) -> Tensor:
        options = {"causal": causal} | ({"hidden": tensors[3]} if len(inputs) == 4 else {})
        weights = dict(zip(parameters, tensors[len(inputs) :], strict=True))
        return functional_call(mechanism, weights, tensors[:3], options)

    points = tuple(x.detach() for x in (*inputs, *parameters.values()))
    generator = torch.Generator().manual_seed(3)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in points)
    output, tangent = torch.func.jvp(attend, points, tangents)
    weight = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    leaves = [x.clone().requires_grad_() for x in points]
    grads = torch.autograd.grad(attend(*leaves), leaves, weight, allow_unused=True, materialize_grads=True)
    return (tangent * weight).sum(), sum((x * y).sum() for x, y in zip(grads, tangents, strict=True))


@pytest.mark.parametrize(("case", "causal"), RUNS)
def test_forward_mode_is_right_or_refused(case: Case, causal: bool):
    if causal and not attention.mechanism_class(case.name).is_causal:
        pytest.skip("not causal")
    try:
        one, other = products(case, causal)
    except NotImplementedError as refused:
        if "forward" not in str(refused):
            raise
    except ValueError:  # an option of some mechanisms, such as a decay, is for causal attention
        if causal:
            raise
    else:
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
