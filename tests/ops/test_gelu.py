"""The two ways to compute GELU agree, at every magnitude."""

import pytest
import torch
import torch.nn.functional as F

from polysketch.ops.gelu import gelu, gelu_, gelu_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_and_its_derivative_are_pytorchs(dtype: torch.dtype):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])]).to(dtype)
    x.requires_grad_()
    grad = torch.linspace(-1, 2, x.numel()).to(dtype)
    expected = F.gelu(x, approximate="tanh")
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    found = gelu(x.detach())
    assert torch.equal(gelu_(x.detach().clone(), torch.empty_like(x)), found[0])
    torch.testing.assert_close(found[0], expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gelu_backward(grad, x.detach(), found), expected_grad, atol=2e-6, rtol=1e-5)
