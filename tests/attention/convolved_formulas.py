"""Linear attention by means and the convolution beside it, written out token by token, for the tests of both kinds."""

from collections.abc import Callable

import torch
from torch import Tensor

from attention.cases import HEAD_DIM, Case
from polysketch import attention

HEADS, KV_HEADS, LENGTH, SIZE = 4, 2, 12, 3
EPSILON = 1e-6


def build(name: str = "focused", **options) -> attention.Mechanism:
    """Float64, with scales (and powers) of its own for every channel."""
    torch.manual_seed(0)
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "num_kv_heads": KV_HEADS, "convolution_size": SIZE}
    mechanism = attention.build(name, **{**sizes, **options}).double()
    for parameter in mechanism.feature_map.parameters():
        parameter.data.normal_()
    return mechanism


def inputs(*, faint: bool = False, length: int = LENGTH, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; `faint`: no positive key, so that means of weights are about the 1e-6 added to them."""
    query, key, value, _ = Case("focused", kv_heads=KV_HEADS).inputs(length=length, seed=seed)
    return query, -key.abs() if faint else key, value


def mean_attention(query: Tensor, key: Tensor, value: Tensor, seen: Callable[[int], slice]) -> Tensor:
    """q (mean k^T v) z with z = 1 / (q . mean k + 1e-6), token by token; all heads alike."""
    outputs = []
    for i in range(query.shape[2]):
        keys, values, one = key[:, :, seen(i)], value[:, :, seen(i)], query[:, :, i, None]
        product = keys.mT @ values / keys.shape[2]
        z = 1 / ((one * keys.mean(2, keepdim=True)).sum(-1, keepdim=True) + EPSILON)
        outputs.append(one @ product * z)
    return torch.cat(outputs, 2)


def convolved(mechanism: attention.Mechanism, value: Tensor, seen: Callable[[int], range]) -> Tensor:
    """b + sum over the tokens that tap after tap names; those outside the sequence are zeros."""
    weight, bias = mechanism.convolution.weight[0], mechanism.convolution.bias
    outputs = []
    for i in range(value.shape[2]):
        taps = [(j, t) for t, j in enumerate(seen(i)) if 0 <= j < value.shape[2]]
        outputs.append(bias + sum(value[:, :, j] * weight[:, t] for j, t in taps))
    return torch.stack(outputs, 2)
