"""The programs of a sliding window in bfloat16, executed on a CPU, beside the plain formula."""

from functools import partial

import pytest
import torch

from attention.covering import first_always
from device.test_window import by_name
from device.yardstick import assert_as_good_as_plain
from ptx.test_programs import CPU, DTYPE

# Width of heads, of values, query heads of a key head, window, tokens, kind.
SIZES = [
    (64, 64, 1, 40, 150, "beside"),
    (20, 33, 2, 37, 70, "masked"),
    (128, 128, 1, 200, 150, "beside"),
    (64, 16, 1, 30, 70, "both sides"),
    (40, 64, 2, 60, 70, "blocks"),
    (7, 3, 1, 5, 1, "alone"),
]


@pytest.mark.parametrize("size", first_always(SIZES, 1), ids=str)
def test_a_window_errs_like_the_plain_formula(size, launched):
    width, value_width, shared, window, tokens, kind = size
    shapes = {"query": (shared, tokens, width), "key": (1, tokens, width), "value": (1, tokens, value_width)}
    if kind == "beside":
        shapes |= {"logit": (shared, tokens), "beside": (shared, tokens, value_width)}
    generator, rows = torch.Generator().manual_seed(0), 2 if kind == "masked" else 1
    given = {name: torch.randn(rows, *x, generator=generator, dtype=torch.float64) for name, x in shapes.items()}
    found, formula = (partial(by_name, backend, window, kind) for backend in ("triton", "reference"))
    assert_as_good_as_plain(found, formula, given, DTYPE, CPU)
    assert launched.keys() == {"window_forward", "window_grad_query", "window_grad_key_value"}
