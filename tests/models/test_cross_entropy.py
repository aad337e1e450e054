"""Losses of tokens in chunks: plain cross-entropy and its gradient, without the logits of all tokens."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from polysketch.models import output_layer, token_losses
from polysketch.targets import NO_TARGET


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    """Seven tokens a chunk, so that the last one is ragged."""
    monkeypatch.setattr(output_layer, "_CHUNK_LOGITS", 7 * 11)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 9, 6), (11, 6), (11,))
    )
    targets = torch.randint(0, 11, (2, 9))
    targets[0, 3] = NO_TARGET
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=NO_TARGET)


@pytest.mark.usefixtures("small_chunks")
def test_losses_and_gradients_are_those_of_plain_cross_entropy():
    *tensors, targets = inputs()
    scale = torch.randn(2, 9, dtype=torch.float64)
    found, expected = token_losses(*tensors, targets), plain(*tensors, targets)
    torch.testing.assert_close(found, expected)
    assert found[0, 3] == 0
    grads = [torch.autograd.grad((losses * scale).sum(), tensors) for losses in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("small_chunks")
def test_no_more_than_a_chunk_of_logits_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, bias, targets = inputs()
    made, products = [], output_layer.products_of
    monkeypatch.setattr(output_layer, "products_of", lambda *args: made.append(products(*args)) or made[-1])
    token_losses(hidden, weight, bias, targets).sum().backward()
    assert [tuple(x.shape) for x in made] == 2 * [(7, 11), (7, 11), (4, 11)]


def test_nothing_of_the_size_of_the_logits_is_saved():
    hidden, weight, bias, targets = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        token_losses(hidden.repeat(1, 50, 1), weight, bias, targets.repeat(1, 50))
    assert max(saved) == 2 * 450 * 6


@pytest.mark.usefixtures("small_chunks")
def test_under_autocast_losses_are_float32_and_close():
    *tensors, targets = inputs(torch.float32)
    exact = token_losses(*tensors, targets)
    exact_grads = torch.autograd.grad(exact.sum(), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_losses(*tensors, targets)
    grads = torch.autograd.grad(found.sum(), tensors)
    assert found.dtype == torch.float32
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()
    for one, other in zip(grads, exact_grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.03 * other.norm()


def rounded_inputs(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of about 8, of which bfloat16 keeps steps of 1/16."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 250, 64), (300, 64), (300,)))
    targets = torch.randint(0, 300, (4, 250))
    targets[0, 3] = NO_TARGET
    tensors = (each.to(device, dtype).requires_grad_() for each in (hidden, weight, bias))
    return *tensors, targets.to(device)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [7, 2000])
def test_losses_of_16_bit_weights_are_those_of_float64(chunk_tokens, dtype, device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_layer, "_CHUNK_LOGITS", chunk_tokens * 300)
    monkeypatch.setattr(output_layer, "_BLOCK_WEIGHTS", 64 * 64)  # several blocks, and a ragged one
    *tensors, targets = rounded_inputs(dtype, device)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    scale = torch.rand(4, 250, dtype=torch.float64, device=device)
    found, expected = token_losses(*tensors, targets), plain(*exact, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-5)
    grads = torch.autograd.grad((found * scale).sum(), tensors)
    for one, other in zip(grads, torch.autograd.grad((expected * scale).sum(), exact), strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() < 0.004 * other.norm()  # of bfloat16 a step is 0.0078, half of that the worst


def test_autocast_rounds_what_is_multiplied_and_nothing_after_it():
    *tensors, targets = rounded_inputs(torch.float32, "cpu")
    hidden, weight, bias = (each.detach() for each in tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_losses(hidden, weight, bias, targets)
    expected = plain(hidden.bfloat16().double(), weight.bfloat16().double(), bias.double(), targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-5)


def test_other_shapes_are_refused():
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match="must agree in batch and length"):
        token_losses(hidden, weight, bias, targets[:, 1:])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_passes_opcheck(dtype):
    hidden, weight, bias, targets = inputs(dtype)
    torch.library.opcheck(
        torch.ops.polysketch.token_losses.default,
        (hidden.detach().flatten(0, 1).requires_grad_(), weight, bias, targets.flatten()),
    )


def test_the_flop_counter_sees_every_product():
    *tensors, targets = inputs()
    with FlopCounterMode(display=False) as counter:
        token_losses(*tensors, targets).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 18 * 11 * 6
