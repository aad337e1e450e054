"""The yardstick sees what is broken: a value, one element that nobody wrote, a gradient, and bits that move."""

from functools import partial

import pytest
import torch

from device import plain
from device.test_exact import inputs
from device.yardstick import assert_as_good_as_plain, assert_within, with_gradients
from polysketch import ops

CPU = torch.device("cpu")
FORMULA = partial(plain.polynomial_attention, degree=4, offset=1.0, causal=True)


def intact(**given):
    return ops.polynomial_attention(**given, degree=4, offset=1.0, causal=True, backend="blockwise")


def wrong_value(**given):
    return intact(**given) * 1.05


def one_element_unwritten(**given):
    output = intact(**given).clone()  # the backward pass needs the op's own
    with torch.no_grad():
        output[0, 0, 0, 0] = torch.nan
    return output


def wrong_gradient(**given):
    extra = given["query"].sum(-1, keepdim=True)
    return intact(**given) + 0.2 * (extra - extra.detach())


TURNS = iter(range(1_000))


def moving(**given):
    return intact(**given) * (1 + 2e-7 * (next(TURNS) % 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (wrong_value, "output errs more|gradient of .* errs more"),
        (one_element_unwritten, "errs more"),
        (wrong_gradient, "gradient of query errs more"),
    ],
)
def test_what_is_broken_is_named(broken, said, dtype):
    given = inputs(16, 40)
    assert_as_good_as_plain(intact, FORMULA, given, dtype, CPU)
    with pytest.raises(AssertionError, match=said):
        assert_as_good_as_plain(broken, FORMULA, given, dtype, CPU)


def test_bits_that_move_are_named():
    with pytest.raises(AssertionError, match=r"not the same twice: .*output"):
        assert_as_good_as_plain(moving, FORMULA, inputs(16, 40), torch.float32, CPU)


@pytest.mark.parametrize("broken", [wrong_value, one_element_unwritten, wrong_gradient])
def test_a_tolerance_names_the_worst(broken):
    given = inputs(16, 40)
    found, expected = (with_gradients(lambda **x: {"output": f(**x)}, given) for f in (broken, FORMULA))  # noqa: B023
    with pytest.raises(AssertionError, match=r"is off by .*, allowed 0.01"):
        assert_within(found, expected, 1e-2)
