"""Named sizes: the papers' models, and two for a CPU. PyTorch is loaded when one of them is made a configuration."""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polysketch.nn import SHORT_CONVOLUTION

if TYPE_CHECKING:
    from polysketch.models.config import ModelConfig

EVERY = "attention_every"
"""The field of a preset that holds for its own mechanism alone."""

_PAPER_VOCABULARY = 32_000

# BASED (Arora et al., arXiv 2402.18668): three of five layers look back two tokens, one sees all, one a short window.
_CONVOLUTION = SHORT_CONVOLUTION
_BASED_PATTERN = (_CONVOLUTION, "based", "sliding-window", _CONVOLUTION, _CONVOLUTION)
# Rotary positions in the windows, none in the sums over all tokens, none at the input.
_BASED_POSITIONS = {"rotary": ("sliding-window",), "input_positions": False}

# What stands around every mechanism where nothing else is asked for: docs/results.md has what it is worth. With a
# convolution of projections a model starts with induction (`nn.SelfAttention`). Rotary positions are enough.
_AROUND = {"projection_convolution": 4, "query_key_norm": True, "head_gate": True, "input_positions": False}

# Every second layer looks beyond its window: it predicts and recalls nearly as well as all of them, in less
# time, with a smaller state (docs/results.md). A mechanism that is asked for by name stands in
# every layer.
_OURS = {**_AROUND, EVERY: 2}

# PolySketchFormer, appendix H: 110M, 337M and 748M parameters with softmax attention; 110M, 335M and 748M here.
_PAPER_SIZES: dict[str, dict[str, Any]] = {
    "gpt2-small": {"vocab_size": _PAPER_VOCABULARY, "num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "gpt2-medium": {"vocab_size": _PAPER_VOCABULARY, "num_layers": 24, "hidden_size": 1024, "num_heads": 16},
    "gpt2-large": {"vocab_size": _PAPER_VOCABULARY, "num_layers": 36, "hidden_size": 1280, "num_heads": 20},
}

PRESETS: dict[str, dict[str, Any]] = {
    **{name: {**sizes, **_OURS} for name, sizes in _PAPER_SIZES.items()},
    # The paper's models: its mechanism, and nothing around it.
    **{f"{name}-paper": {**sizes, "attention": "polysketch-paper"} for name, sizes in _PAPER_SIZES.items()},
    # The models of its appendix F (selective copying, induction heads), and those that Nystromformer and its followers
    # train on Long Range Arena. Heads are as narrow as there.
    "tasks-paper": {
        "vocab_size": 17,
        "num_layers": 2,
        "hidden_size": 128,
        "num_heads": 8,
        "attention": "polysketch-paper",
    },
    "arena-paper": {
        "vocab_size": 257,
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "feedforward_size": 128,
        "attention": "polysketch-paper",
    },
    # The encoder of Reizin's thesis (2024, chapter 5), which reverses digits; it adds positions at the input.
    "reversal-paper": {
        "vocab_size": 11,
        "num_layers": 1,
        "hidden_size": 32,
        "num_heads": 1,
        "rotary": False,
        "attention": "softmax",
    },
    # Heads stay 64 wide: what a head can tell apart grows with its width.
    "tiny": {"vocab_size": 257, "num_layers": 4, "hidden_size": 128, "num_heads": 2, **_OURS},  # bytes; 0.84M
    "tiny-wide": {"vocab_size": 257, "num_layers": 4, "hidden_size": 192, "num_heads": 3, **_OURS},  # 1.9M
    "mini": {"vocab_size": 8_192, "num_layers": 4, "hidden_size": 384, "num_heads": 6, **_OURS},  # 10M
    # The published configuration based-360m: 27 layers, of which the last two are convolutions; its window of 256 is
    # halved by its code, to 128 tokens and the token itself. Layer norms and GELU gates are this library's, RMS norms
    # and SiLU gates theirs; heads of 64 stand before the projections to 16: 371M parameters, 363M by the configuration.
    "based-360m": {
        "vocab_size": 50_257,
        "num_layers": 27,
        "hidden_size": 1024,
        "num_heads": 16,
        "feedforward_size": 2048,
        "attention": _BASED_PATTERN * 5 + (_CONVOLUTION, _CONVOLUTION),
        "attention_options": {"based": {"feature_dim": 16}, "sliding-window": {"window": 129}},
        **_BASED_POSITIONS,
    },
    "based-tiny": {
        "vocab_size": 257,
        "num_layers": 5,
        "hidden_size": 128,
        "num_heads": 2,
        "feedforward_size": 256,
        "attention": _BASED_PATTERN,
        "attention_options": {"based": {"feature_dim": 16}, "sliding-window": {"window": 64}},
        **_BASED_POSITIONS,
    },
}


def preset(name: str, **changes: Any) -> "ModelConfig":
    """The configuration called `name`, with some fields changed.

    Example:
        `preset("gpt2-small", num_layers=13, attention="polysketch", attention_options={"sketch_size": 64})`

    Args:
        name: a key of `PRESETS`.
        **changes: fields of `ModelConfig`. An `attention` stands in every layer unless `attention_every` is among
            them too. Another than the preset's takes its own `attention_options` and `rotary`, not the preset's.

    Raises:
        ValueError: an unknown name or field; the message lists those that exist.
    """
    from polysketch.models.config import ModelConfig

    fields = preset_fields(name)
    if "attention" in changes:
        fields.pop(EVERY, None)
    attention = changes.get("attention", fields.get("attention"))
    if (tuple(attention) if isinstance(attention, list) else attention) != fields.get("attention"):
        for name_of_layers in ("attention_options", "rotary"):
            fields.pop(name_of_layers, None)
    return ModelConfig.from_dict({**fields, **changes})


def preset_attention(
    name: str, options: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> tuple[str | tuple[str, ...], Any]:
    """The preset's own mechanism, or pattern of them, and its options with some changed.

    Args:
        name: a key of `PRESETS`.
        options: changes of the preset's options; a pattern of dictionaries takes their place.

    Raises:
        ValueError: an unknown preset.
    """
    from polysketch.models.config import ModelConfig

    fields = preset_fields(name)
    attention, own = fields.get("attention", ModelConfig.attention), fields.get("attention_options", {})
    if not isinstance(options, Mapping):
        return attention, options
    if isinstance(attention, str):
        return attention, {**own, **options}
    return attention, {key: _merged(own.get(key, {}), options.get(key, {})) for key in {**own, **options}}


def _merged(own: Mapping[str, Any], changes: Any) -> Any:
    """What is no dictionary is left for `ModelConfig` to refuse."""
    return {**own, **changes} if isinstance(changes, Mapping) else changes


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of `ModelConfig` that the preset sets: a copy. Loads nothing.

    Raises:
        ValueError: no such preset; the message lists them.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
    return copy.deepcopy(PRESETS[name])
