"""Norm and rotation of heads by the programs of a device, beside the formula in PyTorch's operations."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, refusal
from polysketch.ops.rotated_heads import rotated_heads, rotated_heads_backend
from polysketch.ops.rotated_heads.api import BACKENDS

Turn = tuple[Tensor | None, Tensor | None]

HEADS = 6
# Width of heads, whether rows have positions of their own.
SIZES = [(64, False), (128, True), (256, False), (80, False), (20, True)]
PARTS = ["norm and rotation, kept", "norm and rotation", "norm", "rotation"]


def both(turn: Turn, kept: bool, backend: str, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Normed and rotated heads, side by side; tokens stand before heads in memory, as a layer hands them over."""
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    made = rotated_heads(x, scale, *turn, keep_normed=kept, backend=backend)
    return torch.cat([one for one in made if one is not None], -1)


def case(width: int, own: bool, parts: str, tokens: int, heads: int = HEADS) -> tuple[Named, Turn]:
    """Rows of different sizes, factors, and angles."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {"x": normal(2, heads, tokens, width) * normal(2, heads, tokens, 1).exp()}
    if "norm" in parts:
        given["scale"] = 1 + normal(heads * width) / 4
    angles = normal(*((2, 1) if own else ()), tokens, width // 2)
    return given, ((angles.cos().float(), angles.sin().float()) if "rotation" in parts else (None, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_backend_errs_like_the_plain_formula(size, parts, dtype, device: Device, record_property):
    given, turn = case(*size, parts, 21 if device.small else 1_501)
    turn = tuple(None if one is None else one.to(device.where) for one in turn)
    like = [one.to(device.where, dtype) for one in given.values()]
    x, scale = like if "norm" in parts else (like[0], None)
    why_not = lambda name: refusal(lambda: rotated_heads_backend(x, scale, *turn, name))  # noqa: E731
    for backend in device.backends(dict.fromkeys(BACKENDS), why_not) or pytest.skip(f"no program takes {dtype} here"):
        attend, formula = (partial(both, turn, "kept" in parts, name) for name in (backend, "reference"))
        assert_as_good_as_plain(attend, formula, given, dtype, device.where, record_property)
