"""Calls of HyperAttention, and the check before they are timed."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polysketch import ops
from polysketch.attention import check_options
from polysketch.benchmarking import calls, mechanisms
from polysketch.benchmarking.agreement import require_agreement
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.workbench import Workbench

HYPER = "hyper"

_CHECKED_LENGTH = 8_192  # at most: plain PyTorch takes its time, and longer rows have nothing new
_SOFTMAX_LENGTH = 512  # at most, of what is compared with softmax
_CHECKED_HEADS = 4
_PARTS = {"min_length": 4, "chunk_size": 8, "sample_size": 8}
"""What these are of a checked row at most: two levels of causal spans are longer than a chunk and its samples."""


def prepare_hyper(shape: Shape, device: torch.device, dtype: torch.dtype, options: Mapping[str, Any]) -> Call:
    """`ops.hyper_attention` of random inputs and hyperplanes, with options of the mechanism `hyper`.

    Its definition is plain PyTorch, on the same device and in the same dtype: in float64 a vector close to a hyperplane
    may be on its other side, and in another chunk.
    """
    given = mechanisms.with_defaults(HYPER, dict(options))
    tensors = calls.heads(shape, device, dtype)
    planes = torch.randn(shape.head_dim, given.pop("hash_bits"), device=device)
    attend = partial(ops.hyper_attention, hyperplanes=planes, causal=shape.causal, **given)

    def plain() -> Call:
        copies = [tensor.detach().clone() for tensor in tensors]
        return Call(lambda: attend(*copies, backend="plain"), copies)

    return Call(lambda: attend(*tensors), tensors, plain)


def check_hyper(bench: Workbench, shape: Shape, options: Mapping[str, Any], *, backward: bool) -> None:
    """Compare HyperAttention with its definition, at the shape's length or, where that is longer, at 8,192 tokens.

    Twice, with up to four heads. Where every chunk has all keys it is softmax attention, in float64, of up to 512
    tokens. And with samples it is what plain PyTorch makes of the same hashes and draws; `min_length`, `chunk_size` and
    `sample_size` are those of the options, or so short that two levels of causal spans have keys that are not met.

    Raises:
        ValueError: naming the error and the tolerance; or options that do not exist.
    """
    check_options(HYPER, options)
    few, name = (
        replace(shape, batch=1, heads=min(shape.heads, _CHECKED_HEADS)),
        "hyper, causal" if shape.causal else HYPER,
    )
    short = replace(few, length=min(shape.length, _SOFTMAX_LENGTH))
    make = partial(_with_all_keys, short, bench.device, bench.dtype, options)
    require_agreement(bench, make, f"{name}, with all keys,", backward=backward)
    row = replace(few, length=min(shape.length, _CHECKED_LENGTH))
    make = partial(prepare_hyper, row, bench.device, bench.dtype, sampled_options(options, row.length))
    reference = "plain PyTorch with the same draws"
    require_agreement(bench, make, f"{name}, with samples,", backward=backward, reference=reference)


def _with_all_keys(shape: Shape, device: torch.device, dtype: torch.dtype, options: Mapping[str, Any]) -> Call:
    """With chunks of as many keys as there are, and with spans: softmax, of which other parts of a row are made."""
    blocks = max(1, shape.length // _PARTS["min_length"])
    call = prepare_hyper(shape, device, dtype, {**options, "min_length": blocks, "chunk_size": shape.length})
    return call._replace(definition=lambda: calls.sdpa_of(calls.exact(call.leaves), causal=shape.causal))


def sampled_options(options: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The options, with sizes that leave a row of that length something to draw."""
    usual = mechanisms.with_defaults(HYPER, dict(options))
    return {**options, **{name: min(usual[name], max(1, length // part)) for name, part in _PARTS.items()}}
