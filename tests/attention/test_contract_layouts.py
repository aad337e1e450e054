"""Tensors of any strides give the numbers of contiguous ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention.cases import Case
from attention.covering import first_always
from attention.test_contract import TIGHT
from attention.test_contract_packed import EACH


def columns(x: Tensor) -> Tensor:
    """Of a wider tensor that holds NaN beside them."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads beside widths": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": columns,
    "widths before tokens": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("layout", first_always(list(LAYOUTS), 2))
@pytest.mark.parametrize(("case", "causal"), EACH)
def test_any_strides_give_the_same_numbers(case: Case, causal: bool, layout: str):
    mechanism, found = case.build(), []
    for lay in (lambda x: x, LAYOUTS[layout]):
        leaves = [x.requires_grad_() for x in case.inputs()]
        query, key, value, hidden = map(lay, leaves)
        output = mechanism(query, key, value, hidden=hidden, causal=causal)
        upstream = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(7))
        wanted = [*leaves, *mechanism.parameters()]
        grads = torch.autograd.grad(output, wanted, lay(upstream), allow_unused=True, materialize_grads=True)
        found.append([output, *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
