"""Replacing the attention of a transformers model in place."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from polysketch import __version__
from polysketch import attention as mechanisms
from polysketch.attention import Mechanism
from polysketch.integrations.replacement.bookkeeping import (
    CONFIG_KEY,
    IMPLEMENTATION,
    SUBMODULE,
    Replacement,
    Sees,
    record_of,
    remember,
)
from polysketch.integrations.replacement.layer_inputs import hand_on
from polysketch.integrations.replacement.locating import (
    Layers,
    Part,
    attention_layers,
    check_architecture,
    check_position_bias,
    check_softcap,
    choose_layers,
    hidden_size_of,
    kind_of,
    layers_of_part,
    plain_model,
    replaced_layers,
    seen_by_layers,
    sizes_of,
)
from polysketch.integrations.replacement.looking import look_at_layers
from polysketch.integrations.replacement.source import mechanism_of
from polysketch.integrations.replacement.taking_over import take_over
from polysketch.models.former import FORMAT

Consent = Literal["refuse", "ignore"]


def replace_attention(
    model: Any,
    name: str,
    *,
    part: Part | None = None,
    layers: Layers = "all",
    sliding_window: Consent = "refuse",
    dropout: Consent = "refuse",
    position_bias: Consent = "refuse",
    softcap: Consent = "refuse",
    **options: Any,
) -> Any:
    """Put a mechanism in the place of a transformers model's attention, in some layers or in all.

    Projections, norms and rotary positions stay the model's own; the mechanism is given the queries and keys that the
    layer's softmax was given, with its scaling. It becomes the submodule `polysketch` of the attention layer, in that
    layer's device and dtype, so that `parameters`, `state_dict`, `to` and optimizers see it. Weights it has are drawn
    from PyTorch's default generator. Padding on either side is honoured, as are grouped heads; `model.generate` decodes
    with the mechanism's state, of constant size where the mechanism's is. A layer that was replaced before is replaced
    again; the others stay as they are.

    A mechanism has the options that suit a model trained with softmax (`Mechanism.after_softmax`) where you set no
    others. One that reads more is given more. One with the option `hidden_size` is told the width of the layer's input
    unless you set it, and may read that input. One that reads queries and keys before rotary positions is given them,
    turned back within rounding (`rotation.turned_back`). Whether that is right for the architecture is found out here:
    the model reads four tokens once.

    Encoders, in which every token sees the whole sequence, take mechanisms that do (`causal=False`); padding on either
    side is honoured there, too. Text encoders whose tokens see the past alone, as CLIP's, take causal ones.

    A model with an encoder and a decoder has three parts: the encoder's self-attention (both sides), the decoder's
    (causal), and the decoder's attention to the encoder (`Mechanism.is_cross`), which `generate` reads once into what
    the mechanism keeps of a source. Without `part` the mechanism stands in all of them, and has to be able to.

    Known to work: Llama, Qwen3, GPT-2, GPT-NeoX, OPT, Gemma 2 and Mistral; BERT, RoBERTa, DistilBERT, ModernBERT, ViT
    and the vision model of SigLIP; T5, BART and Whisper. Models that are built like them are accepted.

    Args:
        model: a model of transformers, a causal language model, an encoder, or both, with its head or without; changed
            in place.
        name: a key of `polysketch.attention.MECHANISMS` that can be what the layers ask for.
        part: "encoder", "decoder" or "cross" of a model with an encoder and a decoder; None for the whole model.
        layers: "all"; -n for the last n; or a list of indices, of which negative ones count from the end. Those of the
            part, or of the whole model: the encoder's, then the decoder's own, then its attention to the encoder.
        sliding_window: what to do with sequences longer than the window that a layer has: "refuse" them when they come,
            unless the mechanism stays within the window, or "ignore" the window.
        dropout: what to do with attention dropout in training: "refuse" it when it comes, or "ignore" it.
        position_bias: what to do with a bias of positions that layers add to their scores, as T5's self-attention:
            "refuse" such layers, or "ignore" it. T5 knows positions by it alone, and must be trained without.
        softcap: what to do with a model whose layers cap their scores, as Gemma 2's: "refuse" it, or "ignore" the cap
            in replaced layers. The others keep it.
        **options: of the mechanism; `polysketch.attention.option_names(name)` lists them.

    Returns:
        `model`.

    Raises:
        TypeError: not a transformers model, or an option of another type.
        ValueError: an unknown mechanism, option or layer; an architecture that cannot be served; a mechanism that
            cannot be what its layers ask for; one that reads the layer's input, or vectors before
            rotary positions, in a layer of which they cannot be known. For such a mechanism the model reads four tokens
            to find that out.
    """
    suited = {**mechanisms.mechanism_class(name).after_softmax, **options}
    replacement = Replacement(name, suited, sliding_window, dropout, position_bias, softcap)
    return install(model, replacement, part, layers)


def install(model: Any, replacement: Replacement, part: Part | None = None, layers: Layers = "all") -> Any:
    """As `replace_attention`, with the mechanism's options as they are in `replacement`."""
    plain = plain_model(model)
    check_architecture(plain)
    for argument in ("sliding_window", "dropout", "position_bias", "softcap"):
        value = getattr(replacement, argument)
        if value not in ("refuse", "ignore"):
            raise ValueError(f'{argument} must be "refuse" or "ignore", got {value!r}')
    check_softcap(plain, replacement.softcap)
    found = attention_layers(plain)
    of_part = layers_of_part(plain, part)
    chosen = [of_part[place] for place in choose_layers(layers, len(of_part))]
    check_position_bias(plain, chosen, replacement.position_bias)
    sees = seen_by_layers(plain)
    built = {index: _build(replacement, found[index], sees[index]) for index in chosen}
    given = _given(plain, replacement.name, built)
    shared = take_over(plain)
    for index, mechanism in built.items():
        _install(found[index], replacement, given[index], mechanism)
    setattr(shared.config, CONFIG_KEY, {"version": __version__, "format": FORMAT, "replaced": _groups(plain)})
    return model


def _build(replacement: Replacement, attention: nn.Module, sees: Sees) -> Mechanism:
    width = hidden_size_of(attention) if "hidden_size" in mechanisms.option_names(replacement.name) else {}
    mechanism = mechanisms.build(replacement.name, **{**sizes_of(attention), **width, **replacement.options})
    if sees == "past" and not mechanism.is_causal:
        raise ValueError(
            f"{replacement.name!r} cannot be causal, so it cannot stand in a language model; mechanisms that can: "
            f"{', '.join(mechanisms.mechanisms_that('is_causal'))}"
        )
    if sees == "both" and not mechanism.is_bidirectional:
        raise ValueError(
            f"{replacement.name!r} is causal only, and every token of this model sees the whole sequence; mechanisms "
            f"that see both sides: {', '.join(mechanisms.mechanisms_that('is_bidirectional'))}"
        )
    if sees == "source" and not mechanism.is_cross:
        raise ValueError(
            f"{replacement.name!r} with these options needs queries and keys of the same tokens, and the decoder's"
            " attention to its encoder has others; mechanisms that can: "
            f"{', '.join(mechanisms.mechanisms_that_cross())}"
        )
    if sees != "past" and (mechanism.reads_hidden or mechanism.reads_unrotated):
        raise ValueError(f"{replacement.name!r} reads more than queries, keys and values, which no encoder hands on")
    device, dtype = kind_of(attention)
    return mechanism.to(device=device, dtype=dtype).train(attention.training)


def _given(model: Any, name: str, built: Mapping[int, Mechanism]) -> dict[int, tuple[str, ...]]:
    """Layer -> what its mechanism is to be given beside query, key and value."""
    reading = {index for index, mechanism in built.items() if mechanism.reads_hidden or mechanism.reads_unrotated}
    rotates = look_at_layers(model, reading) if reading else {}
    for index in reading:
        if index not in rotates:
            raise ValueError(
                f"{name!r} reads more than queries, keys and values, and layer {index} of {type(model).__name__} hands"
                " nothing else on to its attention function: choose a mechanism or options that read no more"
            )
        if built[index].reads_unrotated and rotates[index] is None:
            raise ValueError(
                f"{name!r} reads queries and keys from before rotary positions, and layer {index} of"
                f" {type(model).__name__} tells positions in a way that cannot be undone: choose another mechanism"
            )
    return {index: _read_by(mechanism, bool(rotates.get(index))) for index, mechanism in built.items()}


def _read_by(mechanism: Mechanism, rotates: bool) -> tuple[str, ...]:
    """What of a layer that rotates queries and keys, or does not, is read by the mechanism."""
    read = {"hidden": mechanism.reads_hidden, "unrotated": mechanism.reads_unrotated and rotates}
    return tuple(name for name, is_read in read.items() if is_read)


def _install(attention: Any, replacement: Replacement, given: tuple[str, ...], mechanism: Mechanism) -> None:
    before = record_of(attention)
    assert before is not None
    record = dataclasses.replace(before, replacement=replacement, given=given, hook=None)
    # A configuration of its own keeps the layer replaced, and loud, if set_attn_implementation changes the model's.
    attention.config = copy.copy(record.config)
    attention.config._attn_implementation = IMPLEMENTATION
    attention.add_module(SUBMODULE, mechanism)
    remember(attention, record)
    if record.given:
        record.hook = attention.register_forward_pre_hook(hand_on, with_kwargs=True)


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
