"""Queries and keys to approximate on: Gaussian ones, or those of a trained model."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.evaluation import attention_inputs
from polysketch.models import TransformerLM

__all__ = ["Vectors", "gaussian_vectors", "model_vectors"]


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
