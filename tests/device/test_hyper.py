"""HyperAttention by every backend of a device, beside the plain formula of the same meetings of queries and keys."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device.yardstick import (
    DTYPES,
    Device,
    Named,
    assert_as_good_as_plain,
    assert_within,
    moved,
    rounded,
    with_gradients,
)
from polysketch import ops
from polysketch.ops.hyper import definition
from polysketch.ops.hyper.approximate import Options
from polysketch.ops.hyper.backends import BACKENDS, why_not
from polysketch.ops.hyper.calls import who_meets_whom
from polysketch.ops.hyper.operator import hyper_attention_operator
from polysketch.ops.hyper.types import Given

TOLERANCE = 1e-4
BITS = 5
# (head_dim, value_dim, query heads of a key head)
WIDTHS = [(64, 64, 2), (128, 128, 1), (64, 48, 4), (20, 65, 1)]


def sizes(device: Device) -> dict[str, int]:
    """Blocks, chunks and samples, none of which divides the length."""
    small = {"min_length": 20, "chunk_size": 12, "sample_size": 20}
    return small if device.small else {"min_length": 300, "chunk_size": 128, "sample_size": 100}


def inputs(widths: tuple[int, int, int], device: Device) -> Named:
    """Query, key and value of two key heads, in float64."""
    width, value_dim, shared = (min(16, widths[0]), min(13, widths[1]), min(2, widths[2])) if device.small else widths
    length, generator = 70 if device.small else 1_501, torch.Generator().manual_seed(0)
    shapes = {"query": (2 * shared, length, width), "key": (2, length, width), "value": (2, length, value_dim)}
    return {name: torch.randn(2, *x, generator=generator, dtype=torch.float64) for name, x in shapes.items()}


def planes(width: int) -> Tensor:
    """Of the hashes."""
    return torch.randn(width, BITS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def mask(length: int, device: torch.device) -> Tensor:
    """Row 0 has padding before, in the middle and behind."""
    real = torch.ones(2, length, dtype=torch.bool, device=device)
    real[0, : length // 5] = real[0, length // 2 : length // 2 + 5] = real[0, -7:] = False
    return real


def backends(device: Device, dtype: torch.dtype) -> list[str]:
    """What runs here, or the test is skipped; plain PyTorch is what others are compared with."""
    like = torch.ones(1, 1, 1, 16, dtype=dtype, device=device.where)
    names = {name: None for name in BACKENDS if name != "plain"}
    found = device.backends(names, lambda name: why_not(name, like, like, like, "uniform", None))
    return found or pytest.skip(f"no program on the {device.name} computes {dtype}")


def meeting(given: Named, causal: bool, device: Device) -> Given:
    """Who meets whom, by float64 on the CPU: another precision may choose other keys."""
    of = sizes(device)
    scale = given["query"].shape[3] ** -0.5
    options = Options(planes(given["query"].shape[3]), of["chunk_size"], of["sample_size"], "uniform", 0, scale)
    real = None if causal else mask(given["key"].shape[2], torch.device("cpu"))
    met = who_meets_whom(given["query"], given["key"], real, causal, of["min_length"], options)
    block = of["min_length"] if causal else 0
    met = met._replace(**{name: x.to(device.where) for name, x in met._asdict().items() if name != "parts"})
    return Given(**given, real=None, met=met, block=block, scale=scale)


def by_programs(given: Given, backend: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Half precision in float32 for the programs in C++, as the op has it; the output in the dtype of the inputs."""
    dtype = query.dtype
    query, key, value = (x.float() if backend == "native" else x for x in (query, key, value))
    met = (*given.met[:2], given.met.log_weight.float(), given.met.parts)
    return hyper_attention_operator(query, key, value, None, *met, given.block, given.scale, backend)[0].to(dtype)


def by_formula(given: Given, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All weights at once, in the dtype of the inputs."""
    return definition.attend(given._replace(query=query, key=key, value=value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_programs_err_like_the_plain_formula(widths, causal, dtype, device, record_property):
    tensors = inputs(widths, device)
    given = meeting(rounded(tensors, dtype), causal, device)
    for backend in backends(device, dtype):
        assert_as_good_as_plain(
            partial(by_programs, given, backend),
            partial(by_formula, given),
            tensors,
            dtype,
            device.where,
            lambda name, value: record_property(f"{backend} {name}", value),  # noqa: B023
        )


@pytest.mark.parametrize("causal", [True, False])
def test_the_op_with_padding_agrees_with_plain_pytorch_in_float64(causal, device, record_property):
    """In float32, with hashes of the device: a query on the other side of a plane there would meet other keys."""
    dtype, given = torch.float32, rounded(inputs(WIDTHS[0], device), torch.float32)
    options = {"causal": causal, **sizes(device)}
    length, normals = given["key"].shape[2], planes(given["query"].shape[3]).float()

    def attend(backend: str, where: torch.device, **leaves: Tensor) -> Tensor:
        real = mask(length, where)
        normal = normals.to(where, leaves["query"].dtype)
        return ops.hyper_attention(**leaves, hyperplanes=normal, key_mask=real, backend=backend, **options)

    run = lambda backend, where, tensors: with_gradients(  # noqa: E731
        lambda **leaves: {"output": attend(backend, where, **leaves)}, tensors
    )
    expected = run("plain", torch.device("cpu"), given)
    for backend in backends(device, dtype):
        found = run(backend, device.where, moved(given, device.where, dtype))
        record = lambda name, value: record_property(f"{backend} {name}", value)  # noqa: B023, E731
        assert_within(found, expected, TOLERANCE, record)
