"""Attention swapped in transformers models that people have, through transformers' own registries.

`replace_attention(model, "polysketch", layers=-4)` puts a mechanism in the place of the attention of an unmodified
Llama, Qwen3, GPT-2 or Mistral, or of an encoder, or of both; `restore_attention(model)` undoes it.
"""

from polysketch.integrations.replacement.cache import StateLayer, replacement_cache
from polysketch.integrations.replacement.call import AttentionCall
from polysketch.integrations.replacement.function import register
from polysketch.integrations.replacement.locating import attention_layers, replaced_layers
from polysketch.integrations.replacement.observing import around_attention, observing_attention
from polysketch.integrations.replacement.replace import replace_attention, replaced_mechanisms
from polysketch.integrations.replacement.saving import load_replaced, save_replaced
from polysketch.integrations.replacement.taking_over import restore_attention

__all__ = [
    "AttentionCall",
    "StateLayer",
    "around_attention",
    "attention_layers",
    "load_replaced",
    "observing_attention",
    "replace_attention",
    "replaced_layers",
    "replaced_mechanisms",
    "replacement_cache",
    "restore_attention",
    "save_replaced",
]

register()
