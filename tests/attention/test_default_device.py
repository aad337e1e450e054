"""PyTorch's default device and dtype are for what a user makes: what a call makes itself is where its tensors are."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, HIDDEN, Case, one_of_each
from polysketch.ops.hyper import cpu_kernel


@pytest.fixture(params=["meta", torch.float64], ids=str)
def elsewhere(request: pytest.FixtureRequest) -> Iterator[torch.device | torch.dtype]:
    """A default device that holds no numbers, or a wider default dtype; from `enter` on, called in a test."""
    yield request.param
    leave()
    torch.set_default_dtype(torch.float32)
    cpu_kernel.kernel_agrees.cache_clear()


def enter(default: str | torch.dtype) -> None:
    cpu_kernel.kernel_agrees.cache_clear()
    if isinstance(default, torch.dtype):
        torch.set_default_dtype(default)
    else:
        torch.set_default_device(default)


def leave() -> None:
    """As if no default device had been set: PyTorch 2.9 keeps one that is None, and fails when it is asked for."""
    torch.set_default_device(None)
    torch._GLOBAL_DEVICE_CONTEXT.__dict__.pop("device_context", None)


def results(case: Case, mechanism: torch.nn.Module, tensors: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Outputs and gradients of a sequence, causal where it can be, and outputs of decoding it in three calls."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    options = {"hidden": leaves[3]} if mechanism.reads_hidden else {}
    output = mechanism(*leaves[:3], causal=mechanism.is_causal, key_mask=mask, **options)
    grads = torch.autograd.grad(output.square().sum(), leaves[:3])
    found = [output.detach(), *grads]
    if mechanism.is_causal:
        state = mechanism.init_state(len(mask), "cpu", output.dtype)
        for span in (slice(0, 20), slice(20, 21), slice(21, None)):
            options = {"hidden": tensors[3][:, span]} if mechanism.reads_hidden else {}
            parts = (x[:, :, span] for x in tensors[:3])
            part, state = mechanism.extend(*parts, state, key_mask=mask[:, span], **options)
            found.append(part)
        assert state.position.device.type == "cpu"
    return found


@pytest.mark.parametrize("case", one_of_each(CASES), ids=str)
def test_every_mechanism_computes_the_same(case: Case, elsewhere):
    mechanism = case.build(dtype=torch.float32)
    tensors = list(case.inputs(dtype=torch.float32))
    assert tensors[3].shape[-1] == HIDDEN
    mask = torch.ones(tensors[0].shape[0], tensors[0].shape[2], dtype=torch.bool)
    mask[0, :3] = False
    expected = results(case, mechanism, tensors, mask)
    enter(elsewhere)
    found = results(case, mechanism, tensors, mask)
    leave()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
