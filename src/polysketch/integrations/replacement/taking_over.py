"""A model's masks and attention turned over to the registered functions, and given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polysketch.integrations.replacement.bookkeeping import (
    CONFIG_KEY,
    IMPLEMENTATION,
    SUBMODULE,
    LayerRecord,
    ModelRecord,
    record_of,
    remember,
)
from polysketch.integrations.replacement.cache import give_states_before_forward
from polysketch.integrations.replacement.function import register
from polysketch.integrations.replacement.locating import attention_layers, decoder_of, plain_model, sees_both_sides


def take_over(model: Any) -> ModelRecord:
    """Turn a model's masks and attention over to the registered functions, if that has not been done; none is replaced.

    `restore_attention` undoes it.
    """
    found = attention_layers(model)
    record = record_of(found[0])
    if record is not None:
        return record.model
    register()
    decoder = decoder_of(model)
    causal = not sees_both_sides(model)
    shared = ModelRecord(decoder.config._attn_implementation, decoder.config, causal)
    if causal:
        shared.hook = decoder.register_forward_pre_hook(give_states_before_forward, with_kwargs=True)
    for index, attention in found.items():
        remember(attention, LayerRecord(index, shared))
    decoder.config._attn_implementation = IMPLEMENTATION
    return shared


@contextmanager
def taken_over(model: Any) -> Iterator[ModelRecord]:
    """Within it the model's attention is turned over; one that was unmodified is again afterwards."""
    was_unmodified = record_of(attention_layers(model)[0]) is None
    try:
        yield take_over(model)
    finally:
        if was_unmodified:
            restore_attention(model)


def restore_attention(model: Any) -> Any:
    """Undo `replace_attention`: the model computes what it did before, bit for bit, and has the weights that it had.

    Args:
        model: changed in place; a model in which nothing was replaced stays as it is.

    Returns:
        `model`.
    """
    plain = plain_model(model)
    found = attention_layers(plain)
    record = record_of(found[0])
    if record is None:
        return model
    for attention in found.values():
        _uninstall(attention, record.model)
    if record.model.hook is not None:
        record.model.hook.remove()
    record.model.config._attn_implementation = record.model.implementation
    if hasattr(record.model.config, CONFIG_KEY):
        delattr(record.model.config, CONFIG_KEY)
    return model


def _uninstall(attention: Any, shared: ModelRecord) -> None:
    if hasattr(attention, SUBMODULE):
        delattr(attention, SUBMODULE)
    attention.config = shared.config
    remember(attention, None)
