"""The learned sketch by every backend of a device, beside the networks as one would write them in PyTorch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, named, refusal
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.learned_sketch import learned_sketch, learned_sketch_backend
from polysketch.ops.learned_sketch.api import BACKENDS

SIZES = [(32, 64), (64, 64), (32, 128)]
NETWORKS = [(1, "relu"), (2, "silu"), (3, "gelu")]
_KINK = 1e-5  # how near to zero float32 cannot tell the sign of a sum of such numbers


def inputs(size: int, width: int, device: Device, depth: int = 2) -> Named:
    """x and weights, none of which is zero or one."""
    torch.manual_seed(0)
    sizes = (width // 4, size // 4) if device.small else (width, size)
    module = LearnedSketch(sizes[0], sketch_size=sizes[1], depth=depth)
    weights = [weight.detach().double() for network in module.networks for weight in network.weights()]
    weights = [weight + 0.1 * weight.std().nan_to_num(1.0) * torch.randn_like(weight) for weight in weights]
    x = torch.randn(2, 4, 21 if device.small else 1_501, module.head_dim, dtype=torch.float64)
    return {"x": away_from_kinks(x, weights), **{f"weight_{index:02}": x for index, x in enumerate(weights)}}


def away_from_kinks(x: Tensor, weights: list[Tensor]) -> Tensor:
    """x, with the rows of which a hidden unit of a first stage is next to zero replaced by their neighbour.

    There the gradient of ReLU jumps, and rounding decides to which side.
    """
    near = torch.zeros(x.shape[:3], dtype=torch.bool)
    for scale, bias, up in (weights[:3], weights[len(weights) // 2 :][:3]):
        hidden = F.layer_norm(x, x.shape[-1:], scale, bias, 1e-5) @ up.mT
        near |= (hidden.abs() < _KINK).any(-1)
    places = torch.where(near, -1, torch.arange(x.shape[2])).cummax(2).values.clamp(min=0)
    return x.gather(2, places[..., None].expand_as(x))


def sketch(backend: str, x: Tensor, depth: int = 2, activation: str = "gelu", **weights: Tensor) -> Tensor:
    """The op."""
    return learned_sketch(x, list(weights.values()), 2, depth=depth, activation=activation, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "network"),
    [*((size, (2, "gelu")) for size in SIZES), *((SIZES[0], network) for network in NETWORKS)],
    ids=str,
)
def test_every_backend_errs_like_the_plain_formula(size, network, dtype, device, record_property):
    options = dict(zip(("depth", "activation"), network, strict=True))
    given, formula = inputs(*size, device, network[0]), partial(sketch, "reference", **options)
    like = given["x"].to(device.where, dtype)
    why_not = lambda name: refusal(lambda: learned_sketch_backend(like, name))  # noqa: E731
    for backend in device.backends(BACKENDS, why_not) or pytest.skip(f"no backend computes {dtype} here"):
        record = lambda name, value: record_property(f"{backend} {name}", value)  # noqa: B023, E731
        with named(backend):
            assert_as_good_as_plain(partial(sketch, backend, **options), formula, given, dtype, device.where, record)


def test_the_plain_formula_in_float64_is_the_chunked_backend():
    given = inputs(*SIZES[0], Device("cpu"))
    torch.testing.assert_close(sketch("reference", **given), sketch("chunked", **given), rtol=1e-9, atol=1e-12)
