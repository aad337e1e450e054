"""Cross-entropy and its gradients by the programs of a device, beside the formula in PyTorch's operations."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device.yardstick import Device, Named, assert_as_good_as_plain, refusal
from polysketch.ops.cross_entropy import cross_entropy_, cross_entropy_backend
from polysketch.ops.cross_entropy.api import BACKENDS
from polysketch.targets import NO_TARGET


def case(rows: int, vocabulary: int) -> Named:
    """Logits of different sizes."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"logits": normal(rows, vocabulary) * normal(rows, 1).exp(), "bias": normal(vocabulary)}


def as_losses(backend: str, dtype: torch.dtype, logits: Tensor, bias: Tensor) -> Tensor:
    """Losses, to which autograd knows the gradients that the op gives in a dtype."""
    return _Losses.apply(logits, bias, backend, dtype)


class _Losses(torch.autograd.Function):
    """The sum of the losses, every third row without a target, over 10."""

    @staticmethod
    def forward(ctx, logits: Tensor, bias: Tensor, backend: str, dtype: torch.dtype) -> Tensor:
        targets = torch.arange(len(logits), device=logits.device) * 37 % len(bias)
        targets[1::3] = NO_TARGET
        rounded = dtype if logits.dtype == torch.float32 else logits.dtype
        found = cross_entropy_(logits.clone(), bias, targets, logits.new_tensor(10.0), rounded, backend=backend)
        ctx.save_for_backward(found.logits_gradient, found.bias_gradient)
        return found.losses.sum() / 10

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*(gradient * each for each in ctx.saved_tensors), None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [50_272, 50_257, 256, 33])
def test_every_backend_errs_like_the_plain_formula(vocabulary, dtype, device: Device, record_property):
    given = case(3 if device.small else 301, vocabulary)
    logits, bias = (each.to(device.where, torch.float32) for each in given.values())
    why_not = lambda name: refusal(lambda: cross_entropy_backend(logits, bias, dtype, name))  # noqa: E731
    for backend in device.backends(dict.fromkeys(BACKENDS), why_not) or pytest.skip("no program runs here"):
        op, formula = (partial(as_losses, name, dtype) for name in (backend, "reference"))
        assert_as_good_as_plain(op, formula, given, torch.float32, device.where, record_property)
