"""Every mechanism's formula in plain PyTorch, in the dtype of its inputs: what accuracy is held to.

Weights of polynomials and of features are float32 here too, for half precision has not their range.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from polysketch.attention import Mechanism
from polysketch.feature_maps import PowerSketches
from polysketch.ops.landmark import SAMPLE_RANGE
from polysketch.ops.linear import api as linear
from polysketch.ops.polynomial import api as polynomial


@contextmanager
def reference_backends() -> Iterator[None]:
    """Inside, ops run their quadratic definitions wherever they would pick a backend themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_picked", lambda *arguments, **options: "reference")
        patch.setattr(polynomial, "polynomial_attention_backend", lambda *arguments, **options: "reference")
        yield


def plain_output(mechanism: Mechanism, name: str, inputs: tuple[Tensor, ...]) -> Tensor:
    """By the formula of `FORMULAS`, or else by the mechanism itself over the ops' definitions."""
    query, key, value, hidden = inputs
    if name in FORMULAS:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        return FORMULAS[name](mechanism, query, key, value)
    with reference_backends():
        return mechanism(query, key, value, hidden=hidden, causal=mechanism.is_causal)


def _softmax(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None) -> Tensor:
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    seen = seen if window is None else seen & ~seen.tril(-window)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def _polynomial(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, *, chunk: int | None = None) -> Tensor:
    query, key = mechanism.query_norm(query), mechanism.key_norm(key)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = (query.to(wide) @ key.to(wide).mT).pow(mechanism.degree).tril()
    if chunk is not None:
        chunk_of = torch.arange(query.shape[2]) // chunk
        weights = weights * (chunk_of[:, None] == chunk_of)
    return (weights @ value.to(wide) / (1 + weights.sum(-1, keepdim=True))).to(value.dtype)


def _squared_polynomial(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = mechanism.query_norm(query), mechanism.key_norm(key)
    wide = torch.promote_types(query.dtype, torch.float32)
    powers = _powers(mechanism, query.to(wide), key.to(wide))
    roots = sum(coefficient * power for coefficient, power in zip(mechanism.coefficients.to(wide), powers, strict=True))
    weights = roots.square().tril()
    return (weights @ value.to(wide) / (1 + weights.sum(-1, keepdim=True))).to(value.dtype)


def _powers(mechanism: Mechanism, query: Tensor, key: Tensor) -> list[Tensor]:
    """(batch, heads, queries, keys) of each power, lowest first; sketched ones by the products of their features."""
    feature_map = getattr(mechanism, "feature_map", None)
    if not isinstance(feature_map, PowerSketches):
        return [(query @ key.mT) ** power for power in range(len(mechanism.coefficients))]
    features = feature_map.map_queries(query), feature_map.map_keys(key)
    return [features[0][..., part] @ features[1][..., part].mT for part in feature_map.slices]


def _newton(matrix: Tensor) -> Tensor:
    scale = matrix.abs().sum(-1).amax(-1) * matrix.abs().sum(-2).amax(-1)
    inverse, identity = matrix.mT / scale[..., None, None], torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    for _ in range(6):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


def _nystrom(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length, scale = query.shape[2], query.shape[-1] ** -0.25
    segments = torch.arange(length) * mechanism.num_landmarks // length if length > mechanism.num_landmarks else None
    query, key = query * scale, key * scale
    query_landmarks, key_landmarks = (x if segments is None else _means(x, segments) for x in (query, key))
    middle = _newton((query_landmarks @ key_landmarks.mT).softmax(-1))
    return (query @ key_landmarks.mT).softmax(-1) @ (middle @ ((query_landmarks @ key.mT).softmax(-1) @ value))


def _means(x: Tensor, segments: Tensor) -> Tensor:
    return torch.stack([x[:, :, segments == segment].mean(2) for segment in segments.unique()], 2)


def _skyformer(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scale, half = query.shape[-1] ** -0.25, mechanism.num_landmarks // 2
    tokens = mechanism.samples * query.shape[2] // SAMPLE_RANGE
    query, key = query * scale, key * scale
    landmarks = torch.cat([query[:, :, tokens[:half]], key[:, :, tokens[half:]]], 2)

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        squares = one.square().sum(-1)[..., :, None] + other.square().sum(-1)[..., None, :]
        return (one @ other.mT - squares / 2).exp()

    matrix = kernel(landmarks, landmarks) + 0.1 * torch.eye(len(tokens), dtype=query.dtype)
    root = matrix.sum(-1, keepdim=True).rsqrt()
    inverse = root * _newton(root * matrix * root.mT) * root.mT
    return kernel(query, landmarks) @ (inverse @ (kernel(landmarks, key) @ value))


FORMULAS: dict[str, Callable[[Mechanism, Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": _softmax,
    "hyper": _softmax,
    "sliding-window": lambda mechanism, *inputs: _softmax(mechanism, *inputs, window=mechanism.window),
    "polynomial": _polynomial,
    "squared-polynomial": _squared_polynomial,
    "local": lambda mechanism, *inputs: _polynomial(mechanism, *inputs, chunk=mechanism.local_chunk),
    "nystrom": _nystrom,
    "skyformer": _skyformer,
}
