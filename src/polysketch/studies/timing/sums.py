"""Sums by chunks against sums token by token: a loop over tokens, one state a head, updated in place.

Causal attention over given features, power 1, nothing exact: o_i = phi(q_i) Z_i / phi(q_i) z_i, where Z_i sums
phi(k_j) v_j^T over j <= i, and z_i the same for a value of one. Performer's published code sums token by token; the
paper's lower-triangular multiplication, here `ops.linear_attention`, adds up whole chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch import ops
from polysketch.benchmarking import floors
from polysketch.benchmarking.agreement import require_agreement
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.settings import check_positive
from polysketch.benchmarking.workbench import Workbench
from polysketch.studies.rows import parsed
from polysketch.studies.timing.study import TimeSettings

TOKENS = "token by token"
_CHECKED = Shape(1, 300, 2)
_WARM_UP_LENGTH = 256


@dataclass(frozen=True, kw_only=True)
class SumsSettings(TimeSettings):
    """One size: causal attention over random positive features, power 1, nothing exact.

    Attributes:
        features: of a query or key.
        heads: of queries, keys and values.
        head_dim: width of a value.
    """

    features: int = 2_048
    heads: int = 4
    head_dim: int = 64

    def __post_init__(self) -> None:
        check_positive(features=self.features, heads=self.heads, head_dim=self.head_dim)
        super().__post_init__()

    def shape(self, length: int) -> Shape:
        """The shape at a length."""
        return Shape(1, length, self.heads, self.head_dim)


def token_by_token(query_features: Tensor, key_features: Tensor, value: Tensor) -> Tensor:
    """The sums as a recurrence; forward only.

    Args:
        query_features, key_features: (batch, heads, length, features), positive.
        value: (batch, heads, length, value_dim).

    Returns:
        (batch, heads, length, value_dim), dtype of the value.

    Cost: features x value_dim multiply-adds to fold a token and as many to read, each going through the whole state,
    features x value_dim float32 numbers a head, in memory.
    """
    batch, heads, length, features = key_features.shape
    rows, width, dtype = batch * heads, value.shape[3], torch.promote_types(value.dtype, torch.float32)
    sums = value.new_zeros(rows, features, width, dtype=dtype)
    normalizer = value.new_zeros(rows, features, dtype=dtype)
    numerator = value.new_empty(length, rows, 1, width, dtype=dtype)
    denominator = value.new_empty(length, rows, dtype=dtype)
    tokens = zip(*(tensor.flatten(0, 1).unbind(1) for tensor in (query_features, key_features, value)), strict=True)
    for index, token in enumerate(tokens):
        query, key, row = (part.to(dtype) for part in token)
        sums.addcmul_(key[:, :, None], row[:, None])
        normalizer.add_(key)
        torch.bmm(query[:, None], sums, out=numerator[index])
        torch.linalg.vecdot(query, normalizer, out=denominator[index])
    output = numerator[:, :, 0] / denominator[..., None]
    return output.transpose(0, 1).unflatten(0, (batch, heads)).to(value.dtype)


def by_chunks(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    compute_chunk: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The same by `ops.linear_attention`; shapes as for `token_by_token`."""
    tensors = (query_features, key_features, value)
    return ops.linear_attention(*tensors, causal=True, compute_chunk=compute_chunk, backend=backend).output


def time_sums(bench: Workbench, row: str, settings: SumsSettings, length: int) -> list[dict[str, Any]]:
    """Check both against the reference, then time them in turns, forward.

    Args:
        bench: where.
        row: `chunks`, or `chunks+compute_chunk=128`.
        settings: of the study.
        length: tokens.

    Returns:
        A measurement for each way, and in it all_states_bytes, what one cumulative-sum tensor of all states would take.

    Raises:
        ValueError: a result that disagrees with the reference.
    """
    ways: dict[str, Callable[..., Tensor]] = {TOKENS: token_by_token, row: partial(by_chunks, **parsed(row)[1])}
    for name, way in ways.items():
        require_agreement(bench, partial(_call, way, _CHECKED, settings.features, bench), name, backward=False)
    return _time_length(bench, settings, ways, length)


def _call(way: Callable[..., Tensor], shape: Shape, features: int, bench: Workbench) -> Call:
    tensors = _inputs(shape, features, bench)

    def definition() -> Call:
        exact = [tensor.cpu().double() for tensor in tensors]
        return Call(lambda: by_chunks(*exact, backend="reference"), exact)

    return Call(lambda: way(*tensors), tensors, definition)


def _inputs(shape: Shape, features: int, bench: Workbench) -> list[Tensor]:
    lead = (shape.batch, shape.heads, shape.length)
    options = {"device": bench.device, "dtype": bench.dtype}
    positive = [torch.rand(*lead, features, **options) for _ in range(2)]  # type: ignore[call-overload]
    return [*positive, torch.randn(*lead, shape.head_dim, **options)]  # type: ignore[call-overload]


@torch.no_grad()
def _time_length(
    bench: Workbench, settings: SumsSettings, ways: dict[str, Callable[..., Tensor]], length: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    tensors = _inputs(settings.shape(length), settings.features, bench)
    for way in ways.values():  # a whole length would warm up for as long as it is timed
        way(*(tensor[:, :, :_WARM_UP_LENGTH] for tensor in tensors))
    functions = {name: partial(way, *tensors) for name, way in ways.items()}
    say = bench.saying(f"sums at {length:,}")
    seconds = bench.clock.alternate(functions, repeats=bench.repeats, warmup=0, progress=say)
    return [_measurement(bench, settings, length, name, seconds) for name in ways]


def _measurement(
    bench: Workbench, settings: SumsSettings, length: int, name: str, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    shape = settings.shape(length)
    floor = floors.cumulative_sums(shape, settings.features, itemsize=bench.dtype.itemsize)
    return {
        "direction": f"sums of {settings.features:,} features",
        "length": length,
        "series": name,
        **bench.measurement(seconds, name, TOKENS, shape.tokens, floor),
        "all_states_bytes": shape.rows * settings.features * settings.head_dim * 4,
    }
