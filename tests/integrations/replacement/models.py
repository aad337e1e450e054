"""Tiny models of transformers with random weights, loaded as people load theirs, and text for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from polysketch.integrations.replacement import AttentionCall, observing_attention, replace_attention

VOCABULARY = 97
LAYERS = 3
LENGTH = 45
WINDOW = 64
CHUNK = 8

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # text without long repeats
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
_GPT2 |= {
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=WINDOW)),
}
"""GPT-2's scaling differs from 1 / sqrt(head_dim) in all layers but the first; Mistral's layers have windows."""


def fresh(name: str) -> Any:
    """The model `name` with weights of its own seed, for evaluation."""
    torch.manual_seed(3)
    return MODELS[name]().eval()


def save_all(folder: Path) -> None:
    """One folder a model, by `save_pretrained`."""
    for name in MODELS:
        fresh(name).save_pretrained(folder / name)


def load(folder: Path, name: str, **options: Any) -> Any:
    """The model `name`, by transformers' own loading code."""
    return AutoModelForCausalLM.from_pretrained(folder / name, **options)


def text(rows: int = 3, length: int = LENGTH) -> Tensor:
    """(rows, length) int64 without the padding token."""
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


def left_padding(ids: Tensor) -> Tensor:
    """(rows, length) int64, 0 for padding: none in the last row, less and more than two chunks in the others."""
    mask = torch.ones_like(ids)
    mask[0, : CHUNK - 3] = 0
    mask[1, : 2 * CHUNK + 5] = 0
    return mask


def sketch(model: Any, layers: Any = "all", share: float = 0.5) -> Any:
    """Replace by sketched attention in short chunks, whose prefix holds `share` of the mass: both parts are heard."""
    torch.manual_seed(5)
    options = {"local_chunk": CHUNK, "sketch_size": 8, "prefix_gain": share}
    replace_attention(model, "polysketch-paper", layers=layers, sliding_window="ignore", **options)

    def calibrate(call: AttentionCall) -> Tensor:
        mechanism: Any = call.mechanism
        mechanism.calibrate(call.query, call.key, key_mask=call.key_mask)
        return call.replacement()

    with observing_attention(model, calibrate), torch.no_grad():
        model(text(), use_cache=False)
    return model


def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """(rows, length, vocabulary) without gradients; rows of padding are left out of comparisons by `real`."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, *, tokens: int = CHUNK + 4, **options: Any) -> Any:
    """So many tokens, with the logits that led to them; sampling from one seed."""
    torch.manual_seed(11)
    options = {"do_sample": False, "pad_token_id": 0, **options}
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def assert_same_generation(found: Any, expected: Any, tolerance: float = 2e-4) -> None:
    """Token for token, and logit for logit within rounding; and that there was text to compare."""
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
