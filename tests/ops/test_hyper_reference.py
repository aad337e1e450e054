"""`ops.hyper_attention` is its definition with the same draws: outputs and gradients, by the kernel and by products."""

import pytest
import torch
from torch import Tensor

from attention.covering import pairs_always
from ops.test_hyper import HYPERPLANES, TOLERANCE, tensors
from ops.test_hyper_capping import given_mask
from polysketch import ops
from polysketch.ops.hyper import cpu_kernel
from polysketch.ops.hyper.reference import hyper_attention

OPTIONS = {"hyperplanes": HYPERPLANES, "chunk_size": 8, "sample_size": 6, "min_length": 8, "seed": 3}


def compare(inputs: list[Tensor], mask: Tensor | None = None, **options) -> None:
    """Outputs of real tokens and gradients through them."""
    options = {"causal": False, "sampling": "uniform", **OPTIONS, **options}
    results = []
    for function in (ops.hyper_attention, hyper_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = function(*leaves, key_mask=mask, **options)
        output = output if mask is None else output * mask[:, None, :, None]
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)
        results.append([output, *torch.autograd.grad(output, leaves, weight)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("length", "causal", "sampling", "capping"),
    pairs_always(
        {
            "length": (9, 45, 64, 100),
            "causal": (False, True),
            "sampling": ("uniform", "norm"),
            "capping": (None, (0.7, 1.5)),
        }
    ),
)
def test_every_draw_and_bound_is_that_of_the_definition(length, causal, sampling, capping):
    compare(tensors(length, heads=4, key_heads=2), causal=causal, sampling=sampling, capping=capping)


@pytest.mark.parametrize("sampling", ["uniform", "norm"])
@pytest.mark.parametrize("causal", [False, True])
def test_by_products_too(causal, sampling, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "kernel_agrees", lambda: False)
    compare(tensors(45, batch=2, heads=4, key_heads=2), causal=causal, sampling=sampling)


@pytest.mark.parametrize("capping", [None, (0.7, 1.5)])
@pytest.mark.parametrize("sampling", ["uniform", "norm"])
@pytest.mark.parametrize("causal", [False, True])
def test_with_padding_before_in_the_middle_and_behind(causal, sampling, capping):
    mask = torch.ones(3, 60, dtype=torch.bool)
    mask[0, :7] = mask[1, 20:26] = mask[2, 50:] = False
    mask[0, 55:] = mask[2, :3] = False
    compare(tensors(60, batch=3, heads=2), mask, causal=causal, sampling=sampling, capping=capping)


@pytest.mark.parametrize("sampling", ["uniform", "norm"])
@pytest.mark.parametrize("causal", [False, True])
def test_with_a_given_mask(causal, sampling):
    compare(tensors(45), causal=causal, sampling=sampling, heavy_mask=given_mask(45))


@pytest.mark.parametrize("capping", [None, (0.7, 1.5)])
@pytest.mark.parametrize("keys", [30, 101])
def test_with_queries_of_another_number(keys, capping):
    (query, _, _), (_, key, value) = tensors(64), tensors(keys)
    compare([query, key, value], capping=capping, sampling="norm")
