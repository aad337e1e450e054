"""Small models that say something else at every token, so that a wrong state gives other tokens."""

from typing import Any

import torch

from polysketch.models import ModelConfig, TransformerLM

VOCABULARY = 96


def lively(seed: int = 0, **changes: Any) -> TransformerLM:
    """A model of random weights. Its layers outweigh the embedding, which else repeats the last token for ever, and
    positions, which else hide what was said."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "num_layers": 2, "hidden_size": 64, "num_heads": 2, "head_dim": 32}
    model = TransformerLM(
        ModelConfig(**{**sizes, "projection_convolution": 4, "input_positions": False, **changes})
    ).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.feedforward.down.weight.mul_(4)
            block.attention.output.weight.mul_(8)
        model.embedding.weight.mul_(0.1)
    return model


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
