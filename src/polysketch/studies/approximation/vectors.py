"""Queries and keys to approximate on: Gaussian ones, or those of a trained model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.benchmarking.settings import check_positive
from polysketch.data import PreparedData
from polysketch.evaluation import attention_inputs
from polysketch.models import TransformerLM
from polysketch.training import load_model
from polysketch.training.environment import resolve_device

__all__ = ["InputSettings", "Vectors", "described", "gaussian_vectors", "model_vectors", "vectors_of"]

_FITTED_SHARE = 0.75  # of the split, from its start; what is held out comes from the rest


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Where queries and keys are from: Gaussian numbers, or a trained model that reads text.

    Attributes:
        run: folder of a training run, whose queries and keys are taken; Gaussian, layer-normed ones when None.
        data: folder of prepared text for the run; the one that it was trained on when None.
        split: which part of the text.
        layers: of the model; the first, the middle and the last when None.
        heads: of each layer.
        layer_norm: layer-norm the model's queries and keys, as polynomial attention does.
        head_dim: width of Gaussian queries and keys.
        fit_tokens: queries, and as many keys, that maps are fitted to.
    """

    run: str | None = None
    data: str | None = None
    split: str = "validation"
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] = (0,)
    layer_norm: bool = False
    head_dim: int = 64
    fit_tokens: int = 8_192

    def __post_init__(self) -> None:
        check_positive(head_dim=self.head_dim, fit_tokens=self.fit_tokens)


class Vectors(NamedTuple):
    """Queries, keys and values of one head, in two disjoint parts.

    Attributes:
        name: where they are from.
        fitted: query and key, (tokens, head_dim) each, for maps to be fitted to.
        held_out: query and key, (tokens, head_dim) each, of other texts.
        sequence: query, key and value, (1, 1, length, head_dim) each, in the order of a held-out text.
    """

    name: str
    fitted: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    sequence: tuple[Tensor, Tensor, Tensor]


def vectors_of(settings: InputSettings, tokens: int, seed: int) -> list[Vectors]:
    """The inputs of a study, on the device that is there.

    Args:
        settings: of the study.
        tokens: held-out ones, at least.
        seed: of Gaussian ones.

    Raises:
        FileNotFoundError: no such run.
        ValueError: too few tokens, or layers or heads that the model does not have.
    """
    device = resolve_device("auto")
    if settings.run is None:
        found = gaussian_vectors(settings.head_dim, settings.fit_tokens, tokens, seed)
        return [_on(device, one) for one in found]
    model, description = load_model(Path(settings.run), device=device)
    data = PreparedData.open(description.data if settings.data is None else Path(settings.data))
    context, last = description.context_length, model.config.num_layers - 1
    counts = [-(-count // context) for count in (settings.fit_tokens, tokens)]
    fitted, held_out = _texts(np.asarray(data.split(settings.split).tokens), context, *counts)
    layers = settings.layers if settings.layers is not None else tuple(dict.fromkeys((0, (last + 1) // 2, last)))
    return model_vectors(model, fitted, held_out, layers=layers, heads=settings.heads, norm=settings.layer_norm)


def described(settings: InputSettings) -> str:
    """What the inputs of a study are: of what a run is, wherever it lies.

    Raises:
        FileNotFoundError: no such run.
    """
    if settings.run is None:
        return f"Gaussian queries and keys of {settings.head_dim}, layer-normed"
    model, description = load_model(Path(settings.run))
    config = model.config
    return (
        f"queries and keys of head {', '.join(map(str, settings.heads))} of a model trained for {description.step} "
        f"steps with {config.attention} attention, {config.num_layers} layers, {config.num_heads} heads of "
        f"{config.head_dim}, reading {description.context_length:,} tokens at a time"
        f"{', layer-normed' * settings.layer_norm}"
    )


def _on(device: torch.device, one: Vectors) -> Vectors:
    fitted, held_out, sequence = (tuple(x.to(device) for x in part) for part in one[1:])
    return Vectors(one.name, fitted, held_out, sequence)  # type: ignore[arg-type]


def _texts(tokens: np.ndarray, context: int, fitted: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Windows spread over the first three quarters of the tokens, and over the last."""
    cut = int(len(tokens) * _FITTED_SHARE)
    return _windows(tokens[:cut], context, fitted), _windows(tokens[cut:], context, held_out)


def _windows(tokens: np.ndarray, context: int, count: int) -> Tensor:
    if len(tokens) < context * count:
        raise ValueError(
            f"expected at least {context * count:,} tokens in that part of the split, found {len(tokens):,}: take "
            "another split, fewer fit_tokens or shorter lengths"
        )
    starts = [number * (len(tokens) // count) for number in range(count)]
    return torch.from_numpy(np.stack([tokens[start : start + context] for start in starts]).astype(np.int64))


def gaussian_vectors(head_dim: int, fit_tokens: int, tokens: int, seed: int) -> list[Vectors]:
    """Layer-normed Gaussian vectors, independent of one another: no direction is worth more than another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return F.layer_norm(torch.randn(count, head_dim, generator=generator), (head_dim,))

    fitted, held_out = (draw(fit_tokens), draw(fit_tokens)), (draw(tokens), draw(tokens))
    sequence = tuple(x[None, None] for x in (*held_out, draw(tokens)))
    return [Vectors("Gaussian", fitted, held_out, sequence)]  # type: ignore[arg-type]


def model_vectors(
    model: TransformerLM, fitted: Tensor, held_out: Tensor, *, layers: Sequence[int], heads: Sequence[int], norm: bool
) -> list[Vectors]:
    """Of a trained model reading two lots of text.

    Args:
        model: whose attention is looked at.
        fitted, held_out: ids, (windows, context) int64 each.
        layers: which, from 0 on.
        heads: which query heads, of each layer, with the key heads that serve them.
        norm: layer-norm queries and keys, without scale and bias, as polynomial attention would.

    Returns:
        One for each layer and head.

    Raises:
        ValueError: a layer or head that the model does not have.
    """
    config = model.config
    for name, asked, count in (("layers", layers, config.num_layers), ("heads", heads, config.num_heads)):
        if not asked or min(asked) < 0 or max(asked) >= count:
            raise ValueError(f"expected {name} from 0 to {count - 1}, found {', '.join(map(str, asked)) or 'none'}")
    parts = [attention_inputs(model, ids) for ids in (fitted, held_out)]
    found = []
    for layer in layers:
        for head in heads:
            vectors = [_of_head(*part[layer][:3], head, norm) for part in parts]
            flat = [(query.flatten(0, 1), key.flatten(0, 1)) for query, key, _ in vectors]
            name = f"layer {layer}" + (f" head {head}" if len(heads) > 1 else "")
            sequence = tuple(x[:1, None] for x in vectors[1])
            found.append(Vectors(name, flat[0], flat[1], sequence))  # type: ignore[arg-type]
    return found


def _of_head(query: Tensor, key: Tensor, value: Tensor, head: int, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(windows, length, width) of one head and of the key head that serves it."""
    key_head = head * key.shape[1] // query.shape[1]
    pair = query[:, head], key[:, key_head]
    if norm:
        pair = F.layer_norm(pair[0], pair[0].shape[-1:]), F.layer_norm(pair[1], pair[1].shape[-1:])
    return *pair, value[:, key_head]
