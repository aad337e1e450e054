"""The mean loss of tokens: as their plain mean, forward and backward, with every logit made once."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.test_cross_entropy import DEVICES, inputs, plain, rounded_inputs
from polysketch.models import mean_token_loss, output_layer, token_losses
from polysketch.targets import NO_TARGET


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    """Seven tokens a chunk, so that the last one is ragged."""
    monkeypatch.setattr(output_layer, "_CHUNK_LOGITS", 7 * 11)


def plain_mean(*tensors: Tensor) -> Tensor:
    return plain(*tensors).sum() / (tensors[-1] != NO_TARGET).sum()


def test_loss_and_gradients_are_those_of_plain_cross_entropy():
    *tensors, targets = inputs()
    found, expected = mean_token_loss(*tensors, targets), plain_mean(*tensors, targets)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(3.5 * loss, tensors) for loss in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("count", [5, torch.tensor(5)])
def test_another_number_divides_the_sum(count):
    *tensors, targets = inputs()
    found, expected = mean_token_loss(*tensors, targets, count), plain(*tensors, targets).sum() / 5
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss, tensors) for loss in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients_it_is_the_same_number():
    *tensors, targets = inputs()
    with torch.no_grad():
        torch.testing.assert_close(mean_token_loss(*tensors, targets), plain_mean(*tensors, targets))


def test_every_logit_is_made_once(monkeypatch: pytest.MonkeyPatch):
    *tensors, targets = inputs()
    made, products = [], output_layer.products_of
    monkeypatch.setattr(output_layer, "products_of", lambda *args: made.append(products(*args)) or made[-1])
    mean_token_loss(*tensors, targets).backward()
    assert [tuple(x.shape) for x in made] == [(7, 11), (7, 11), (4, 11)]


def test_the_flop_counter_sees_every_product():
    *tensors, targets = inputs()
    with FlopCounterMode(display=False) as counter:
        mean_token_loss(*tensors, targets).backward()
    assert counter.get_total_flops() == 3 * 2 * 18 * 11 * 6


def test_gradients_are_kept_and_neither_logits_nor_what_they_are_made_of():
    hidden, weight, bias, targets = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        mean_token_loss(hidden.repeat(1, 50, 1), weight, bias, targets.repeat(1, 50))
    assert sum(x.numel() for x in saved if x.is_floating_point()) <= 2 * 450 * 6 + weight.numel() + bias.numel() + 1
    assert all(x.data_ptr() not in (hidden.data_ptr(), weight.data_ptr()) for x in saved)


def test_a_kept_graph_gives_the_same_gradients_again():
    *tensors, targets = inputs()
    loss = mean_token_loss(*tensors, targets)
    first = torch.autograd.grad(2 * loss, tensors, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(2 * loss, tensors), strict=True):
        assert torch.equal(one, other)


def test_a_second_derivative_is_refused():
    *tensors, targets = inputs()
    (grad, *_) = torch.autograd.grad(mean_token_loss(*tensors, targets), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_no_further_from_float64_than_the_losses_of_tokens(dtype, device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_layer, "_CHUNK_LOGITS", 70 * 300)
    *tensors, targets = rounded_inputs(dtype, device)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    expected = plain_mean(*exact, targets)
    expected_grads = torch.autograd.grad(expected, exact)
    count = (targets != NO_TARGET).sum()
    ways = [mean_token_loss(*tensors, targets), token_losses(*tensors, targets).sum() / count]
    assert ways[0].dtype == torch.float32
    assert abs(ways[0].item() - expected.item()) < 2e-6 * expected.item()
    grads = [torch.autograd.grad(loss, tensors) for loss in ways]
    for one, before, other in zip(*grads, expected_grads, strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() < 1.05 * (before - other).norm() + 1e-7 * other.norm()


def test_the_scale_of_a_float16_loss_comes_before_its_gradients_are_rounded():
    """Divided by thousands of tokens first, they would vanish."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float16) * 0.01 for shape in ((1, 4000, 16), (11, 16)))
    tensors = [hidden.requires_grad_(), weight.requires_grad_(), torch.zeros(11, dtype=torch.float16)]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    targets = torch.randint(11, (1, 4000))
    (found,) = torch.autograd.grad(2.0**16 * mean_token_loss(*tensors, targets), hidden)
    (expected,) = torch.autograd.grad(2.0**16 * plain_mean(*exact, targets), exact[0])
    assert (found - expected).norm() < 0.004 * expected.norm()


def test_under_autocast_it_is_the_mean_of_the_losses_of_tokens():
    *tensors, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = mean_token_loss(*tensors, targets)
        expected = token_losses(*tensors, targets).sum() / (targets != NO_TARGET).sum()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss, tensors) for loss in (found, expected)]
    for one, other in zip(*grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_compiled_it_is_one_graph_and_gives_the_same():
    *tensors, targets = inputs()
    torch.compiler.reset()
    compiled = torch.compile(mean_token_loss, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*tensors, targets), mean_token_loss(*tensors, targets)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(2 * loss, tensors) for loss in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_passes_opcheck(dtype):
    hidden, weight, bias, targets = inputs(dtype)
    divisor = torch.tensor(5.0, dtype=output_layer.wide(dtype))
    torch.library.opcheck(
        torch.ops.polysketch.mean_token_loss.default,
        (hidden.detach().flatten(0, 1), weight.detach(), bias.detach(), targets.flatten(), divisor),
    )


def test_other_shapes_are_refused():
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match="must agree in batch and length"):
        mean_token_loss(hidden, weight, bias, targets[:, 1:])
