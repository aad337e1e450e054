"""Named sizes: the papers' models, and two for a CPU."""

from typing import Any

from polysketch.models.config import ModelConfig

_PAPER_VOCABULARY = 32_000

PRESETS: dict[str, dict[str, Any]] = {
    # PolySketchFormer, appendix H: 110M, 337M and 748M parameters with softmax attention.
    "gpt2-small": {"vocab_size": _PAPER_VOCABULARY, "num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "gpt2-medium": {"vocab_size": _PAPER_VOCABULARY, "num_layers": 24, "hidden_size": 1024, "num_heads": 16},
    "gpt2-large": {"vocab_size": _PAPER_VOCABULARY, "num_layers": 36, "hidden_size": 1280, "num_heads": 20},
    # Heads stay 64 wide: the contrast of a polynomial weight grows with the square of the head size.
    "tiny": {"vocab_size": 257, "num_layers": 4, "hidden_size": 128, "num_heads": 2},  # bytes and end of text; 1M
    "mini": {"vocab_size": 8_192, "num_layers": 4, "hidden_size": 384, "num_heads": 6},  # 10M
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration called `name`, with some fields changed.

    Example:
        `preset("gpt2-small", num_layers=13, attention="polysketch", attention_options={"sketch_size": 64})`

    Args:
        name: a key of `PRESETS`.
        **changes: fields of `ModelConfig`.

    Raises:
        ValueError: an unknown name or field; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
    return ModelConfig.from_dict({**PRESETS[name], **changes})
