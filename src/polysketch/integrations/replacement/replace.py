"""Replacing the attention of a transformers model in place, and undoing it."""

import copy
from typing import Any, Literal

from torch import nn

from polysketch import __version__
from polysketch import attention as mechanisms
from polysketch.attention import Mechanism
from polysketch.integrations.replacement.bookkeeping import (
    CONFIG_KEY,
    IMPLEMENTATION,
    SUBMODULE,
    LayerRecord,
    ModelRecord,
    Replacement,
    record_of,
    remember,
)
from polysketch.integrations.replacement.cache import give_states_before_forward, mechanism_of
from polysketch.integrations.replacement.function import register
from polysketch.integrations.replacement.locating import (
    Layers,
    attention_layers,
    check_architecture,
    choose_layers,
    decoder_of,
    kind_of,
    plain_model,
    replaced_layers,
    sizes_of,
)

Consent = Literal["refuse", "ignore"]


def replace_attention(
    model: Any,
    name: str,
    *,
    layers: Layers = "all",
    sliding_window: Consent = "refuse",
    dropout: Consent = "refuse",
    **options: Any,
) -> Any:
    """Put a mechanism in the place of a transformers model's attention, in some layers or in all.

    Projections, norms and rotary positions stay the model's own; the mechanism is given the queries and keys that the
    layer's softmax was given, with its scaling. It becomes the submodule `polysketch` of the attention layer, in that
    layer's device and dtype, so that `parameters`, `state_dict`, `to` and optimizers see it. Weights it has are drawn
    from PyTorch's default generator. Padding on either side is honoured, as are grouped heads; `model.generate` decodes
    with the mechanism's state, of constant size where the mechanism's is. A layer that was replaced before is replaced
    again; the others stay as they are.

    Known to work: Llama, Qwen3, GPT-2 and Mistral; models that are built like them are accepted.

    Args:
        model: a causal language model of transformers, or the model without its head; changed in place.
        name: a key of `polysketch.attention.MECHANISMS` that can be causal.
        layers: "all"; -n for the last n; or a list of indices, of which negative ones count from the end.
        sliding_window: what to do with sequences longer than the window that a layer has: "refuse" them when they come,
            unless the mechanism stays within the window, or "ignore" the window.
        dropout: what to do with attention dropout in training: "refuse" it when it comes, or "ignore" it.
        **options: of the mechanism; `polysketch.attention.option_names(name)` lists them.

    Returns:
        `model`.

    Raises:
        TypeError: not a transformers model, or an option of another type.
        ValueError: an unknown mechanism, option or layer; an architecture that cannot be served; a mechanism that
            cannot be causal, or needs the layer's input.
    """
    plain = plain_model(model)
    check_architecture(plain)
    for argument, value in (("sliding_window", sliding_window), ("dropout", dropout)):
        if value not in ("refuse", "ignore"):
            raise ValueError(f'{argument} must be "refuse" or "ignore", got {value!r}')
    found = attention_layers(plain)
    chosen = choose_layers(layers, len(found))
    replacement = Replacement(name, dict(options), sliding_window, dropout)
    built = {index: _build(replacement, found[index]) for index in chosen}
    shared = take_over(plain)
    for index, mechanism in built.items():
        _install(found[index], LayerRecord(index, shared, replacement), mechanism)
    setattr(shared.config, CONFIG_KEY, {"version": __version__, "replaced": _groups(plain)})
    return model


def _build(replacement: Replacement, attention: nn.Module) -> Mechanism:
    mechanism = mechanisms.build(replacement.name, **sizes_of(attention), **replacement.options)
    if not mechanism.is_causal:
        raise ValueError(f"{replacement.name!r} cannot be causal, so it cannot stand in a language model")
    if mechanism.reads_hidden:
        raise ValueError(
            f"{replacement.name!r} with these options needs the layer's input, which transformers does not give to "
            "attention functions: leave out what reads it"
        )
    device, dtype = kind_of(attention)
    return mechanism.to(device=device, dtype=dtype).train(attention.training)


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
    shared = ModelRecord(implementation=decoder.config._attn_implementation, config=decoder.config)
    shared.hook = decoder.register_forward_pre_hook(give_states_before_forward, with_kwargs=True)
    for index, attention in found.items():
        remember(attention, LayerRecord(index, shared))
    decoder.config._attn_implementation = IMPLEMENTATION
    return shared


def _install(attention: Any, record: LayerRecord, mechanism: Mechanism) -> None:
    # A configuration of its own keeps the layer replaced, and loud, if set_attn_implementation changes the model's.
    attention.config = copy.copy(record.model.config)
    attention.config._attn_implementation = IMPLEMENTATION
    attention.add_module(SUBMODULE, mechanism)
    remember(attention, record)


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


def replaced_mechanisms(model: Any) -> dict[int, Mechanism]:
    """Layer index -> the mechanism in its attention, for the layers that were replaced; none in an unmodified model."""
    return {index: mechanism_of(module) for index, module in replaced_layers(model).items()}


def _groups(model: Any) -> list[dict[str, Any]]:
    """What was replaced, for the configuration, which is saved with the model: layers with the same together."""
    groups: dict[str, dict[str, Any]] = {}
    for index, attention in replaced_layers(model).items():
        replacement = _replacement_of(attention)
        what = {**vars(replacement), "options": dict(replacement.options)}
        groups.setdefault(repr(what), {"layers": [], **what})["layers"].append(index)
    return list(groups.values())


def _replacement_of(attention: nn.Module) -> Replacement:
    record = record_of(attention)
    assert record is not None
    assert record.replacement is not None
    return record.replacement
