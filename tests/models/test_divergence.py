"""Divergences of tokens in chunks: torch's own and their gradient, without the logits of all tokens."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear
from torch.utils.flop_counter import FlopCounterMode

from polysketch.models import output_layer
from polysketch.models.divergence import token_divergences

VOCABULARY = 11


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    """Seven tokens a chunk, so that the last one is ragged."""
    monkeypatch.setattr(output_layer, "_CHUNK_LOGITS", 7 * VOCABULARY)


def output(hidden_size: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states of two rows of nine tokens, weight and bias; logits of about 2."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 9, hidden_size), (VOCABULARY, hidden_size), (VOCABULARY,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def plain(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    log_student, log_teacher = (linear(*each).log_softmax(-1) for each in (student, teacher))
    return kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)


@pytest.mark.usefixtures("small_chunks")
def test_divergences_and_gradients_are_those_of_kl_div_over_whole_logits():
    """The teacher is wider than the student, and tokens count unequally."""
    student, teacher = output(6, seed=0), output(8, seed=1)
    scale = torch.randn(2, 9, dtype=torch.float64)
    found, expected = token_divergences(*student, *teacher), plain(student, teacher)
    torch.testing.assert_close(found, expected)
    assert expected.min() > 0.1
    grads = [torch.autograd.grad((each * scale).sum(), student) for each in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("small_chunks")
def test_the_gradient_is_that_of_finite_differences():
    student, teacher = output(6, seed=0), [each.detach() for each in output(8, seed=1)]
    assert torch.autograd.gradcheck(lambda *tensors: token_divergences(*tensors, *teacher), student)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(dtype):
    student = output(6, 0, dtype)
    found = token_divergences(*student, *(each.detach().clone() for each in student))
    assert not found.any()
    assert not any(grad.any() for grad in torch.autograd.grad(found.sum(), student))


@pytest.mark.usefixtures("small_chunks")
def test_the_teacher_gets_no_gradient():
    student, teacher = output(6, seed=0), output(8, seed=1)
    token_divergences(*student, *teacher).sum().backward()
    assert all(each.grad is not None for each in student)
    assert all(each.grad is None for each in teacher)


@pytest.mark.usefixtures("small_chunks")
def test_no_more_than_a_chunk_of_logits_of_each_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch):
    made, products = [], output_layer.products_of
    monkeypatch.setattr(output_layer, "products_of", lambda *args: made.append(products(*args)) or made[-1])
    token_divergences(*output(6, seed=0), *output(8, seed=1)).sum().backward()
    assert [tuple(x.shape) for x in made] == 4 * [(7, 11)] + 2 * [(4, 11)] + 4 * [(7, 11)] + 2 * [(4, 11)]


def test_nothing_of_the_size_of_the_logits_is_saved():
    student, teacher = output(6, seed=0), output(8, seed=1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        token_divergences(student[0].repeat(1, 50, 1), *student[1:], teacher[0].repeat(1, 50, 1), *teacher[1:])
    assert max(saved) == 2 * 450 * 8


def test_under_autocast_divergences_are_float32_and_round_only_what_is_multiplied():
    student, teacher = both = output(6, 0, torch.float32), output(8, 1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_divergences(*student, *teacher)
    assert found.dtype == torch.float32
    rounded = [[hidden.bfloat16().double(), weight.bfloat16().double(), bias.double()] for hidden, weight, bias in both]
    torch.testing.assert_close(found.double(), plain(*rounded), rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found.sum(), student)
    for one, other in zip(grads, torch.autograd.grad(plain(student, teacher).sum(), student), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.03 * other.norm()


def test_what_does_not_fit_is_refused():
    student, teacher = output(6, seed=0), output(8, seed=1)
    with pytest.raises(ValueError, match="must agree in batch and length"):
        token_divergences(*student, teacher[0][:, 1:], *teacher[1:])
    with pytest.raises(ValueError, match="must agree in vocabulary, found 11 and 10 entries"):
        token_divergences(*student, teacher[0], teacher[1][1:], teacher[2][1:])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_passes_opcheck(dtype):
    student, teacher = output(6, 0, dtype), [each.detach() for each in output(8, 1, dtype)]
    hidden, teacher_hidden = (each[0].detach().flatten(0, 1) for each in (student, teacher))
    torch.library.opcheck(
        torch.ops.polysketch.token_divergences.default,
        (hidden.requires_grad_(), *student[1:], teacher_hidden, *teacher[1:]),
    )


def test_the_flop_counter_sees_every_product():
    with FlopCounterMode(display=False) as counter:
        token_divergences(*output(6, seed=0), *output(8, seed=1)).sum().backward()
    assert counter.get_total_flops() == 2 * 18 * VOCABULARY * (4 * 6 + 2 * 8)
