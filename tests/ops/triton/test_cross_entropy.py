"""The programs of cross-entropy and its gradients under Triton's interpreter, against the formula in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import pytest
import torch
import torch.nn.functional as F
import triton as compiler
import triton.language as tl

from attention.covering import first_always
from polysketch.models import mean_token_loss, output_layer
from polysketch.ops.cross_entropy import CrossEntropy, api, cross_entropy_, cross_entropy_backend
from polysketch.ops.cross_entropy.triton.programs import forward, gradient
from polysketch.ops.triton import forced
from polysketch.targets import NO_TARGET

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SMALL = {"BLOCK": 16, "num_warps": 4, "num_stages": 1}
PROGRAMS = ["cross_entropy", "cross_entropy_gradient"]
INF = float("inf")


@pytest.fixture
def small_blocks():
    """Several blocks of a row and several rows of a program, the last of them not full."""
    with forced(cross_entropy=SMALL, cross_entropy_gradient={**SMALL, "ROWS": 2}):
        yield


@pytest.fixture
def programs_on_a_cpu(nothing_asked, monkeypatch):
    """A CPU that "auto" of this op alone takes for a device of the programs, which has asked nothing yet."""
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})


def case(rows, vocabulary, seed=0):
    """Logits, bias and targets; the first and the last entry are targets, and a row in between has none."""
    generator = torch.Generator().manual_seed(seed)
    logits, bias = (torch.randn(shape, generator=generator) for shape in ((rows, vocabulary), (vocabulary,)))
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    targets[1:-1:3] = NO_TARGET
    return logits, bias, targets


def by_programs(logits, bias, targets, divisor=5.0, dtype=torch.float32):
    return cross_entropy_(logits, bias, targets, torch.tensor(divisor), dtype, backend="triton")


def by_formula(logits, bias, targets, divisor=5.0):
    """Everything in float64, the gradient by autograd."""
    logits, bias = (each.double().requires_grad_() for each in (logits, bias))
    losses = F.cross_entropy(logits + bias, targets, reduction="none", ignore_index=NO_TARGET)
    return CrossEntropy(losses.detach(), *torch.autograd.grad(losses.sum() / divisor, (logits, bias)))


def relative_errors(found, expected):
    pairs = zip(found, expected, strict=True)
    return [((a - b).norm() / b.norm()).nan_to_num(torch.inf).item() for a, b in pairs]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", first_always([(5, 43), (4, 32), (2, 2), (2, 16), (7, 70), (3, 17)], 3))
def test_losses_and_gradients_are_those_of_the_formula_at_any_vocabulary_and_rows(size):
    given = case(*size)
    found = by_programs(*given)
    assert {one.dtype for one in found} == {torch.float32}
    assert max(relative_errors(found, by_formula(*given))) < 1e-6


@pytest.mark.parametrize("vocabulary", first_always([8200, 2048, 5]))
def test_the_shipped_configurations_agree_with_the_formula(vocabulary):
    given = case(3, vocabulary)
    assert max(relative_errors(by_programs(*given), by_formula(*given))) < 1e-6


def test_one_entry_has_no_loss():
    found = by_programs(torch.randn(2, 1), torch.randn(1), torch.tensor([0, NO_TARGET]))
    assert all(torch.equal(one, torch.zeros_like(one)) for one in found)


@pytest.mark.usefixtures("small_blocks")
def test_a_row_without_a_target_is_zero_whatever_stands_in_it():
    logits, bias, targets = case(5, 43)
    logits[1, 20] = float("nan")
    assert targets[1] == NO_TARGET
    found = by_programs(logits, bias, targets)
    assert found.losses[1] == 0
    assert not found.logits_gradient[1].any()
    assert found.bias_gradient.isfinite().all()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("outside", [43, -1, -99, 2**40, -(2**62)])
def test_a_target_outside_the_vocabulary_gives_no_number_in_its_row_alone(outside):
    logits, bias, targets = case(5, 43)
    good = by_programs(logits, bias, targets)
    targets[2] = outside
    found = by_programs(logits, bias, targets)
    assert found.losses.isnan().tolist() == [False, False, True, False, False]
    assert found.logits_gradient.isnan().all(1).tolist() == [False, False, True, False, False]
    others = [0, 1, 3, 4]
    assert torch.equal(found.logits_gradient[others], good.logits_gradient[others])


@pytest.mark.usefixtures("small_blocks")
def test_a_gradient_in_half_precision_is_rounded_once_and_the_bias_has_the_sum_of_what_was_not_rounded():
    given = case(5, 43)
    found, exact = by_programs(*given, dtype=torch.float16), by_programs(*given)
    assert torch.equal(found.logits_gradient, exact.logits_gradient.half())
    assert torch.equal(found.losses, exact.losses)
    assert torch.equal(found.bias_gradient, exact.bias_gradient)


@pytest.mark.usefixtures("small_blocks")
def test_a_bias_in_half_precision_is_added_in_float32():
    logits, bias, targets = case(5, 43)
    found, expected = by_programs(logits, bias.half(), targets), by_formula(logits, bias.half(), targets)
    assert max(relative_errors(found, expected)) < 1e-6


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # NumPy's
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("columns", "value"),
    [(slice(0, 20), -INF), (slice(5, 43), -INF), (slice(20, 21), 1e30), (slice(0, 43), -1e30), (slice(3, 4), 88.0)],
)
def test_entries_that_cannot_be_and_large_ones_give_what_the_formula_gives(columns, value):
    """A whole first block of -inf among them."""
    logits, bias, _ = case(4, 43)
    logits[:, columns] = value
    targets = torch.tensor([3, 20, 42, NO_TARGET])
    for found, expected in zip(by_programs(logits, bias, targets), by_formula(logits, bias, targets), strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_no_number_among_the_logits_is_no_number_in_the_loss(value):
    logits, bias, targets = case(3, 43)
    logits[0, 30] = value
    found = by_programs(logits, bias, targets)
    assert found.losses.isnan().tolist() == [True, False, False]
    assert found.logits_gradient[0].isnan().any()


@pytest.mark.usefixtures("small_blocks")
def test_the_small_loss_of_a_sure_row_keeps_its_digits():
    """Of a logit of 100,000 float32 has steps of 0.008."""
    logits = torch.full((1, 20), 1e5)
    logits[0, 3] += 4.0
    found = by_programs(logits, torch.zeros(20), torch.tensor([3]))
    assert abs(found.losses.item() / by_formula(logits, torch.zeros(20), torch.tensor([3])).losses.item() - 1) < 1e-6


def test_no_rows_have_an_empty_gradient_and_none_of_the_bias():
    found = by_programs(torch.empty(0, 43), torch.randn(43), torch.empty(0, dtype=torch.int64))
    assert [one.shape for one in found] == [(0,), (0, 43), (43,)]
    assert not found.bias_gradient.any()


@pytest.mark.usefixtures("small_blocks")
def test_the_definition_is_the_formula_and_the_programs_leave_logits_as_they_are():
    logits, bias, targets = case(5, 43)
    kept = logits.clone()
    by_programs(logits, bias, targets)
    assert torch.equal(logits, kept)
    found = cross_entropy_(logits, bias, targets, torch.tensor(5.0), torch.float32, backend="reference")
    assert max(relative_errors(found, by_formula(kept, bias, targets))) < 1e-6


@pytest.mark.parametrize(
    ("logits", "bias", "dtype", "reason"),
    [
        (torch.float64, torch.float32, torch.float32, r"got torch\.float64"),
        (torch.bfloat16, torch.float32, torch.float32, r"got torch\.bfloat16"),
        (torch.float32, torch.float64, torch.float32, r"no float64 bias"),
        (torch.float32, torch.float32, torch.float64, r"no float64 bias or gradient"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(logits, bias, dtype, reason):
    given = torch.zeros(2, 3, dtype=logits), torch.zeros(3, dtype=bias), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=reason):
        cross_entropy_(*given, torch.tensor(1.0), dtype, backend="triton")
    assert cross_entropy_backend(given[0], given[1], dtype) == "reference"


def test_rows_that_are_not_contiguous_are_refused_and_other_tensors_may_have_any_strides():
    logits, bias, targets = case(3, 4)
    with pytest.raises(RuntimeError, match="takes contiguous logits"):
        by_programs(logits.mT.contiguous().mT, bias, targets)
    apart = [torch.stack([one, one], 1)[:, 0] for one in (bias, targets)]
    assert not any(one.is_contiguous() for one in apart)
    pairs = zip(by_programs(logits, *apart), by_programs(logits, bias, targets), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    logits, bias, _ = case(3, 4)
    assert cross_entropy_backend(logits, bias, torch.float32, "triton") == "triton"
    assert cross_entropy_backend(logits, bias, torch.float32) == "reference"
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        cross_entropy_backend(logits, bias, torch.float32, "cuda")


def mean_loss_and_gradients(count=None):
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()  # noqa: E731
    tensors = [normal(2, 9, 6), normal(11, 6), normal(11)]
    targets = torch.randint(11, (2, 9), generator=generator)
    targets[0, 3] = NO_TARGET
    loss = mean_token_loss(*tensors, targets, count)
    return [loss.detach(), *torch.autograd.grad(3.5 * loss, tensors)]


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_the_mean_loss_of_tokens_is_the_same_by_the_programs_as_without(monkeypatch, launched):
    monkeypatch.setattr(output_layer, "_CHUNK_LOGITS", 7 * 11)
    found = mean_loss_and_gradients()
    assert launched == PROGRAMS * 4  # once to compare it with the definition, and for three chunks
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    expected = mean_loss_and_gradients()
    assert len(launched) == 8
    assert max(relative_errors(found, expected)) < 1e-6


@compiler.jit
def without_bias(logits, bias, columns, wanted, VOCABULARY: tl.constexpr):
    return forward.load_logits(logits, columns, wanted, VOCABULARY)


@compiler.jit
def the_last_block_alone(logits, bias, wanted, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    x = forward.biased(logits, bias, (VOCABULARY - 1) // BLOCK * BLOCK + tl.arange(0, BLOCK), wanted, VOCABULARY)
    return tl.max(x, 0), tl.sum(tl.exp(x - tl.max(x, 0)), 0)


@compiler.jit
def of_the_first(logits, bias, target, VOCABULARY: tl.constexpr):
    return tl.load(logits) + tl.load(bias)


@compiler.jit
def undivided(target, divisor, VOCABULARY: tl.constexpr):
    return 1.0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "broken", "wrong"),
    [
        (forward, "biased", without_bias, [True, True, True]),
        (forward, "sum_of_exponentials", the_last_block_alone, [True, True, True]),
        (forward, "logit_of", of_the_first, [True, False, False]),
        (forward, "share_of", undivided, [False, True, True]),
        (gradient, "share_of", undivided, [False, True, True]),
    ],
)
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, name, broken, wrong, monkeypatch):
    logits, bias, targets = case(5, 43)
    targets[targets == NO_TARGET] = 7  # all have a share
    expected = by_formula(logits, bias, targets)
    monkeypatch.setattr(module, name, broken)
    assert [error > 1e-2 for error in relative_errors(by_programs(logits, bias, targets), expected)] == wrong
