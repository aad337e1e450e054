"""More or fewer token ids for a model that is there already."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polysketch import models


def fit_vocabulary(model: nn.Module, vocab_size: int, *, mean: bool) -> None:
    """Give configurations and biases of a model the number of ids that its embedding has.

    Args:
        model: of transformers, whose embedding has been resized.
        vocab_size: of the embedding.
        mean: new biases are the mean of the others; else 0.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, models.ModelConfig):
            changed: Any = module
            changed.config = replace(config, vocab_size=vocab_size)
        bias = module._parameters.get("output_bias")
        if bias is not None:
            module.output_bias = _resized(bias, vocab_size, mean=mean)


@torch.no_grad()
def draw_ids(embedding: nn.Embedding, first: int) -> None:
    """Draw the ids from `first` on as a new model draws them: the vectors of transformers would be far longer."""
    embedding.weight[first:].normal_(std=embedding.embedding_dim**-0.5)


@torch.no_grad()
def _resized(bias: nn.Parameter, size: int, *, mean: bool) -> nn.Parameter:
    new = bias.mean() if mean else bias.new_zeros(())
    values = torch.cat([bias[:size], new.expand(max(size - len(bias), 0))])
    return nn.Parameter(values, requires_grad=bias.requires_grad)
