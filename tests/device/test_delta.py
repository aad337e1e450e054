"""The delta rule by every backend of a device, beside the plain formula, and behind a state."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from device import plain
from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, assert_within, moved, refusal, rounded
from polysketch import ops
from polysketch.ops.delta.operator import BACKENDS

# (features, factors, width): the mechanism's, whose values end in a one, and others.
SIZES = [(48, 2, 65), (48, 2, 64), (32, 2, 128), (64, 2, 33), (64, 1, 64), (20, 1, 48)]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def inputs(features: int, factors: int, width: int, device: Device) -> Named:
    """Keys of length one, which lean toward each other so that every token changes what all later ones write."""
    if device.small:
        features, width = features // 4 // factors * factors, width // 4
    length, generator = 37 if device.small else 333, torch.Generator().manual_seed(0)
    shapes = {"key": (features,), "value": (width,), "strength": ()}
    drawn = {
        name: torch.randn(2, 3, length, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    parts = (drawn["key"] + 0.3).unflatten(-1, (factors, -1))
    return {**drawn, "key": F.normalize(parts, dim=-1).flatten(-2), "strength": drawn["strength"].sigmoid()}


def backends(device: Device, dtype: torch.dtype) -> list[str]:
    """What runs here; the op computes half precision in float32."""
    like = torch.ones(1, 1, 1, 2, dtype=torch.promote_types(dtype, torch.float32), device=device.where)
    why_not = lambda name: refusal(lambda: ops.delta_writes_backend(like, backend=name))  # noqa: E731
    return device.backends(BACKENDS, why_not) or pytest.skip(f"no backend of the {device.name} computes {dtype}")


def write(backend: str, factors: int, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
    """The op."""
    return ops.delta_writes(key, value, strength, factors=factors, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_backend_errs_like_the_plain_formula(size, dtype, device, record_property):
    given, factors = inputs(*size, device), size[1]
    for backend in backends(device, dtype):
        record = lambda name, value: record_property(f"{backend} {name}", value)  # noqa: B023, E731
        formula = partial(plain.delta_writes, factors=factors)
        assert_as_good_as_plain(partial(write, backend, factors), formula, given, dtype, device.where, record)


def attend(factors: int, query: Tensor, **given: Tensor) -> Tensor:
    """What the sums answer to queries."""
    return ops.delta_attention(query, given["key"], given["value"], given["strength"], factors=factors)


def answers(factors: int, query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
    """The formula of that."""
    written = plain.delta_writes(key, value, strength, factors=factors)
    options = {"power": 1, "factors": factors, "causal": True, "offset": 0.0, "normalize": False, "degree": 2}
    return plain.linear_attention(query, key, written, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 2, 65), SIZES[4]], ids=str)
def test_answers_err_like_the_plain_formula(size, dtype, device, record_property):
    given, factors = inputs(*size, device), size[1]
    given = {"query": given["key"].flip(2), **given}
    record = lambda name, value: record_property(f"auto {name}", value)  # noqa: E731
    attention, formula = partial(attend, factors), partial(answers, factors)
    assert_as_good_as_plain(attention, formula, given, dtype, device.where, record)


def test_the_plain_formula_in_float64_is_the_reference():
    given = inputs(*SIZES[0], Device("cpu"))
    found = plain.delta_writes(**given, factors=2)
    torch.testing.assert_close(found, write("reference", 2, **given), rtol=1e-9, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [SIZES[0], SIZES[5]], ids=str)
def test_behind_a_state_a_sequence_goes_on(size, dtype, device):
    """The second part of a sequence, behind the sums of the first, by every backend."""
    factors, given = size[1], rounded(inputs(*size, device), dtype)
    before = given["key"].shape[2] // 3
    expected = write("reference", factors, **given)
    first = given["key"][:, :, :before]
    options = {"factors": factors, "causal": True, "normalize": False, "return_state": True}
    state = ops.linear_attention(first, first, expected[:, :, :before], **options).state
    here = moved({"sums": state.sums}, device.where, torch.float32)["sums"]
    rest = moved({name: x[:, :, before:] for name, x in given.items()}, device.where, dtype)
    sizes = {"factors": factors, "device": device.where}
    begun = ops.LinearAttentionState.init(*here.shape[:2], first.shape[3], here.shape[3], **sizes)
    begun.sums.copy_(here)
    for backend in backends(device, dtype):
        found = ops.delta_writes(*rest.values(), factors=factors, state=begun, backend=backend)
        assert_within({"output": found}, {"output": expected[:, :, before:]}, TOLERANCES[dtype])
