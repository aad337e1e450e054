"""Small models that learn to count: rows of ids, each with a step of its own, modulo the vocabulary."""

from typing import Any

import torch

from polysketch.models import ModelConfig, TransformerLM

VOCABULARY, STEPS_APART, CHUNK = 41, (1, 2, 3, 5), 16

KINDS: dict[str, dict[str, Any]] = {
    "polysketch-paper": {
        "attention": "polysketch-paper",
        "attention_options": {"sketch_size": 8, "local_chunk": CHUNK, "prefix_gain": 0.5},
    },
    "based": {
        "attention": ("short-convolution", "based", "sliding-window"),
        "attention_options": {"based": {"feature_dim": 8}, "sliding-window": {"window": 11}},
        "rotary": ("sliding-window",),
        "input_positions": False,
    },
    "softmax": {"attention": "softmax"},
    "performer": {"attention": "performer", "attention_options": {"num_features": 32, "local_chunk": CHUNK}},
}
"""Learned sketch with exact chunks; a hybrid with short convolutions; growing keys and values; random features."""
SHOWN = ("polysketch-paper", "based")
"""With all that a cache can hold: sums, chunks, last tokens, and a window of keys and values."""


def counting(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, length) ids: each row counts by its own step, modulo the vocabulary."""
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    step = torch.tensor(STEPS_APART)[torch.randint(0, len(STEPS_APART), (rows, 1), generator=generator)]
    return (start + step * torch.arange(length)) % VOCABULARY


def untrained(kind: str) -> TransformerLM:
    """A model as it was initialised."""
    torch.manual_seed(0)
    config = KINDS[kind]
    layers = 3 if isinstance(config["attention"], tuple) else 2
    return TransformerLM(ModelConfig(VOCABULARY, layers, hidden_size=48, num_heads=3, **config))


def train_counting(kind: str, steps: int = 70) -> TransformerLM:
    """A model in evaluation mode and float64 that has learned to count."""
    model = untrained(kind)
    generator = torch.Generator().manual_seed(1)
    model.calibrate(counting(8, 64, generator))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        loss = model.loss(counting(16, 72, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.double().eval()
