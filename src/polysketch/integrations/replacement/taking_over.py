"""A model's masks and attention turned over to the registered functions, and given back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

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
from polysketch.integrations.replacement.locating import (
    attention_layers,
    decoder_of,
    plain_model,
    seen_by_layers,
    stacks_of,
)


def take_over(model: Any) -> ModelRecord:
    """Turn a model's masks and attention over to the registered functions, if that has not been done; none is replaced.

    `restore_attention` undoes it.

    Raises:
        ValueError: a model made from the configuration of a replaced one, which does not say what its own attention is.
    """
    found = attention_layers(model)
    record = record_of(found[0])
    if record is not None:
        return record.model
    register()
    decoder, sees = decoder_of(model), seen_by_layers(model)
    _check_own_attention(model)
    _own_configurations(model)
    configs = {id(stack.config): stack.config for stack in stacks_of(model)}.values()
    stacks = [(config, config._attn_implementation) for config in configs]
    shared = ModelRecord(stacks[-1][1], _saved_config(model), stacks)
    if "past" in sees.values():
        shared.hook = decoder.register_forward_pre_hook(give_states_before_forward, with_kwargs=True)
    for index, attention in found.items():
        slot = index - list(sees.values()).index(sees[index])
        remember(attention, LayerRecord(index, shared, sees[index], slot, attention.config))
    for config, _ in stacks:
        config._attn_implementation = IMPLEMENTATION
    return shared


def _check_own_attention(model: Any) -> None:
    if any(stack.config._attn_implementation == IMPLEMENTATION for stack in stacks_of(plain_model(model))):
        raise ValueError(
            f"expected a model with attention of its own, found attn_implementation={IMPLEMENTATION!r}, as in one made"
            ' from the configuration of a replaced model: call model.set_attn_implementation("sdpa") first'
        )


def _own_configurations(model: Any) -> None:
    """Copies of its configurations: another model that was made from the same objects is to stay as it is."""
    copies: dict[int, Any] = {}
    for module in plain_model(model).modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copies)


def _saved_config(model: Any) -> Any:
    """The configuration that is saved with the model."""
    stacks = stacks_of(plain_model(model))
    return stacks[0].config if len(stacks) == 1 else plain_model(model).config


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

    Its configuration stays a copy of the object that it was made from.

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
        _uninstall(attention)
    if record.model.hook is not None:
        record.model.hook.remove()
    for config, implementation in record.model.stacks:
        config._attn_implementation = implementation
    if hasattr(record.model.config, CONFIG_KEY):
        delattr(record.model.config, CONFIG_KEY)
    return model


def _uninstall(attention: Any) -> None:
    record = record_of(attention)
    assert record is not None
    if hasattr(attention, SUBMODULE):
        delattr(attention, SUBMODULE)
    attention.config = record.config
    remember(attention, None)
