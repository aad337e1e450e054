"""Finding the attention layers of a transformers model, and what mechanisms need to know of them."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from polysketch.integrations.replacement.bookkeeping import SUBMODULE, Sees

_UNSERVED_ATTRIBUTES = ("sinks", "v_head_dim", "qk_head_dim", "qk_rope_head_dim")
_UNSERVED_SETTINGS = (
    "attention_chunk_size",
    "num_kv_shared_layers",
    "add_cross_attention",
    "reorder_and_upcast_attn",
    "use_bidirectional_attention",
)
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}

_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_NUM_HEADS = ("num_heads", "n_heads")
"""Names that architectures have for the same."""

Part = Literal["encoder", "decoder", "cross"]
"""Of a model with an encoder and a decoder: the self-attention of either, or the decoder's attention to the encoder."""

PARTS: dict[Part, Sees] = {"encoder": "both", "decoder": "past", "cross": "source"}

Layers = Literal["all"] | int | Sequence[int]


def plain_model(model: Any) -> PreTrainedModel:
    """The transformers model itself, out of a PEFT model that wraps it.

    Raises:
        TypeError: anything else than a transformers model, or a model of this library.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model such as LlamaForCausalLM, got {type(model).__name__}; replace attention"
            " before torch.compile or any other wrapper"
        )
    if type(model).__module__.startswith("polysketch."):
        raise TypeError(
            f"{type(model).__name__} is a model of this library, which has its mechanism already: train one with"
            " another --attention"
        )
    return model


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head, or its decoder: what runs the layers, makes their masks and fills caches."""
    decoder: Any = model.get_decoder() if has_two_sides(model) else model.base_model
    return _innermost(decoder)


def _innermost(stack: PreTrainedModel) -> PreTrainedModel:
    """The model inside that runs all the layers, where there is one: OPT's head calls it past the model around it."""
    inside = [child for child in stack.children() if isinstance(child, PreTrainedModel)]
    whole = [child for child in inside if _number_of_layers(child) == _number_of_layers(stack) > 0]
    return _innermost(whole[0]) if whole else stack


def _number_of_layers(stack: nn.Module) -> int:
    return sum(_is_attention(module) for module in stack.modules())


def has_two_sides(model: PreTrainedModel) -> bool:
    """Whether it has an encoder and a decoder that looks at it."""
    config: Any = model.config
    return bool(getattr(config, "is_encoder_decoder", False)) and model.get_encoder() is not model.get_decoder()


def stacks_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """What runs layers and makes masks: the decoder, behind its encoder where it has one."""
    decoder = decoder_of(model)
    return [model.get_encoder(), decoder] if has_two_sides(model) else [decoder]


def attention_layers(model: Any) -> dict[int, nn.Module]:
    """Layer index -> its attention module, in order, of a transformers model.

    Of an encoder and a decoder: the encoder's layers, then the self-attention of the decoder's, then their attention to
    the encoder.

    Raises:
        TypeError: anything else than a transformers model.
        ValueError: an architecture in which not every layer has one self-attention of the known form.
    """
    model = plain_model(model)
    if has_two_sides(model):
        return dict(enumerate(module for part in PARTS for module in _layers_of_part(model, part)))
    decoder = decoder_of(model)
    found = [module for module in decoder.modules() if _is_attention(module)]
    indices = _indices(found)
    expected = getattr(decoder.config, "num_hidden_layers", None)
    if expected is None or sorted(indices) != list(range(expected)):
        _refuse_own_attention(decoder)
        raise ValueError(
            f"{type(model).__name__} does not have one self-attention with a layer_idx in each of its {expected} layers"
            f" (found those of layers {sorted(indices)}), so its attention cannot be replaced here. Llama, Qwen3,"
            " GPT-2, GPT-NeoX, Mistral, BERT, ModernBERT and ViT, and models built like them, can"
        )
    return dict(sorted(zip(indices, found, strict=True)))


def _layers_of_part(model: Any, part: Part) -> list[nn.Module]:
    stack = model.get_encoder() if part == "encoder" else model.get_decoder()
    found = [module for module in stack.modules() if _is_attention(module)]
    if part != "encoder":
        found = [module for module in found if bool(module.is_causal) == (part == "decoder")]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention of the known form in its {part}, or has no {part} though its"
            " configuration says is_encoder_decoder, so that it cannot be replaced here. T5, BART and Whisper, and"
            " models built like them, can"
        )
    return found


def layers_of_part(model: Any, part: Part | None) -> list[int]:
    """The indices of the layers of a part, in order; of all parts for None.

    Raises:
        ValueError: a part of a model that has no parts, or an unknown one.
    """
    every = attention_layers(model)
    if part is None:
        return list(every)
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}, or None for all, got {part!r}")
    if not has_two_sides(plain_model(model)):
        raise ValueError(f"part={part!r} is of models with an encoder and a decoder, got {type(model).__name__}")
    return [index for index, sees in seen_by_layers(model).items() if sees == PARTS[part]]


def seen_by_layers(model: Any) -> dict[int, Sees]:
    """Layer index -> what its tokens attend to."""
    model = plain_model(model)
    found = attention_layers(model)
    if not has_two_sides(model):
        causal = any(bool(module.is_causal) for module in found.values()) or _masks_causally(decoder_of(model))
        return dict.fromkeys(found, "past" if causal else "both")
    sees = [PARTS[part] for part in PARTS for _ in _layers_of_part(model, part)]
    return dict(enumerate(sees))


def _masks_causally(stack: nn.Module) -> bool:
    """Whether its masks are causal though its layers do not say so, as of CLIP's text model; read off the source.

    One that can make masks of both kinds, as BERT, has layers that say which.
    """
    kinds: set[Any] = {type(module) for module in stack.modules()}
    sources = [_source_of(kind) for kind in kinds]
    return any("create_causal_mask(" in source and "create_bidirectional_mask(" not in source for source in sources)


def _refuse_own_attention(decoder: nn.Module) -> None:
    """Say so where layers compute attention themselves, as GPT-J's."""
    for module in decoder.modules():
        kind = type(module)
        if "Attention" in kind.__name__ and hasattr(module, "is_causal") and not _asks_the_registry(kind):
            raise ValueError(_NOT_ASKED.format(name=kind.__name__))


def replaced_layers(model: Any) -> dict[int, nn.Module]:
    """Layer index -> its attention module, of the layers whose attention was replaced; none in an unmodified model."""
    found = attention_layers(model)
    return {index: module for index, module in found.items() if hasattr(module, SUBMODULE)}


def _is_attention(module: nn.Module) -> bool:
    if "Attention" not in type(module).__name__ or not hasattr(module, "config"):
        return False
    if getattr(module, "is_causal", None) is False:  # an encoder's; those that hold such a module ask no registry
        return _head_dim(module) is not None and _asks_the_registry(type(module))
    named = all(hasattr(module, name) for name in ("layer_idx", "is_causal", "scaling"))
    return named and _head_dim(module) is not None


def _indices(found: Sequence[nn.Module]) -> list[int]:
    """The numbers of attention layers: their own, or where they have none, by their order."""
    own = [getattr(module, "layer_idx", None) for module in found]
    return list(range(len(found))) if None in own else [int(index) for index in own]  # type: ignore[arg-type]


def _head_dim(attention: nn.Module) -> int | None:
    return _number(attention, _HEAD_DIMS)


def _number(attention: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these attributes that is there and a number."""
    found = (getattr(attention, name, None) for name in names)
    return next((number for number in found if isinstance(number, int)), None)


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse a model whose attention does more than a mechanism can take the place of.

    Raises:
        ValueError: naming what the model has.
    """
    name, config = type(model).__name__, decoder_of(model).config
    two_sides = has_two_sides(model)
    if not two_sides and config.get_text_config(decoder=True) is not config:
        raise ValueError(f"{name} has a configuration within its configuration; pass its language model alone")
    for setting in _UNSERVED_SETTINGS:
        if getattr(config, setting, None):
            raise ValueError(f"{name} has {setting}={getattr(config, setting)!r}, which a replaced layer cannot honour")
    kinds = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise ValueError(f"{name} has layers of the types {', '.join(sorted(kinds))}: only attention can be replaced")
    found = attention_layers(model)
    for module in found.values():
        _check_attention(name, module)
    if two_sides:
        return
    causal = {bool(module.is_causal) for module in found.values()}
    if len(causal) > 1 or ("past" in seen_by_layers(model).values() and not getattr(config, "is_causal", True)):
        raise ValueError(f"{name}'s attention is causal in some layers or calls alone, which cannot be replaced")


def _check_attention(name: str, module: nn.Module) -> None:
    for attribute in _UNSERVED_ATTRIBUTES:
        if hasattr(module, attribute):
            raise ValueError(f"{name}'s attention has {attribute}, which a replaced layer cannot honour")
    if not _asks_the_registry(type(module)):
        raise ValueError(_NOT_ASKED.format(name=type(module).__name__))


def check_softcap(model: PreTrainedModel, consent: str) -> None:
    """Refuse a model whose attention caps its scores, as Gemma 2's, where capping is not ignored.

    Raises:
        ValueError: without consent.
    """
    cap = getattr(decoder_of(model).config, "attn_logit_softcapping", None)
    if cap and consent != "ignore":
        raise ValueError(
            f"{type(model).__name__} caps its scores (attn_logit_softcapping={cap!r}), for which mechanisms have no"
            ' place: pass softcap="ignore" to do without it in replaced layers'
        )


def check_position_bias(model: Any, chosen: Sequence[int], consent: str) -> None:
    """Refuse layers that add a bias of positions to their scores, as T5's, for which no mechanism has a place.

    Raises:
        ValueError: without consent; or layers that take their bias from one whose keys a cache of states does not hold.
    """
    found, sees = attention_layers(model), seen_by_layers(model)
    for kind in ("both", "past"):
        layers = [index for index, each in sees.items() if each == kind]
        owners = [index for index in layers if hasattr(found[index], "relative_attention_bias")]
        if not owners or not set(chosen) & set(layers):
            continue
        if consent != "ignore":
            raise ValueError(
                f"{type(model).__name__}'s layers add a bias of positions to the scores of their self-attention, for"
                ' which mechanisms have no place: pass position_bias="ignore" to do without it, and train; or replace'
                ' part="cross" alone, which has none'
            )
        left = sorted(set(layers) - set(chosen) - set(replaced_layers(model)))
        if kind == "past" and left and len(owners) < len(layers) and owners[0] in chosen:
            raise ValueError(
                f"layer {owners[0]} makes the bias of positions that layer {left[0]} adds while it decodes, and a state"
                " does not tell how many keys there are: replace all layers of the decoder, or leave the first one"
            )


def _asks_the_registry(attention_class: Any) -> bool:
    """Whether it looks its function up as every newer model of transformers does; read off the source, as there."""
    source = _source_of(attention_class)
    return "ALL_ATTENTION_FUNCTIONS" in source and "self.config._attn_implementation" in source


@functools.cache  # to find the source of a class is to parse its file
def _source_of(attention_class: type) -> str:
    """The source of a class, nothing where there is none."""
    try:
        return inspect.getsource(attention_class)
    except (OSError, TypeError):
        return ""


_NOT_ASKED = (
    "{name} does not look its attention function up in transformers' AttentionInterface by the layer's configuration,"
    " so that a replacement would not be called"
)


def choose_layers(layers: Layers, count: int) -> list[int]:
    """The indices that `layers` names, in order.

    Args:
        layers: "all"; -n for the last n; or a list of indices, of which negative ones count from the end.
        count: layers of the model.

    Raises:
        TypeError: neither of these.
        ValueError: no layer, more layers than there are, or one that is named twice.
    """
    if isinstance(layers, str):
        if layers != "all":
            raise ValueError(f'layers must be "all", -n for the last n layers or a list of indices, got {layers!r}')
        return list(range(count))
    if isinstance(layers, bool):
        raise TypeError(f'layers must be "all", -n for the last n layers or a list of indices, got {layers!r}')
    if isinstance(layers, int):
        return _last_layers(layers, count)
    chosen = [_index(layer, count) for layer in layers]
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"layers must name at least one layer, and none twice, got {list(layers)}")
    return sorted(chosen)


def _last_layers(layers: int, count: int) -> list[int]:
    if layers >= 0:
        raise ValueError(
            f"layers={layers} is neither a number of last layers nor a list: -{max(layers, 1)} means the last"
            f" {max(layers, 1)}, [{layers}] means layer {layers} alone"
        )
    if -layers > count:
        raise ValueError(f"layers={layers} means the last {-layers} layers; the model has {count}")
    return list(range(count + layers, count))


def _index(layer: Any, count: int) -> int:
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise TypeError(f"a layer must be named by its index, got {layer!r}")
    if not -count <= layer < count:
        raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {count - 1}")
    return layer % count


def sizes_of(attention: nn.Module) -> dict[str, Any]:
    """num_heads, head_dim and num_kv_heads, as `polysketch.attention.build` takes them."""
    config: Any = attention.config
    if getattr(config, "is_encoder_decoder", False):  # either side may have a number of its own
        heads = _number(attention, _NUM_HEADS) or config.num_attention_heads
        return {"num_heads": heads, "head_dim": _head_dim(attention), "num_kv_heads": heads}
    return {
        "num_heads": config.num_attention_heads,
        "head_dim": _head_dim(attention),
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }


def hidden_size_of(attention: nn.Module) -> dict[str, int]:
    """hidden_size, the width of the layer's input, for mechanisms that read it."""
    config: Any = attention.config
    return {"hidden_size": config.hidden_size}


def kind_of(attention: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the layer's floating-point weights.

    Raises:
        ValueError: weights that are not loaded, or none that are floating.
    """
    for parameter in attention.parameters():
        if parameter.device.type == "meta":
            raise ValueError("the model's weights are not loaded (they are on the meta device); load them first")
        if parameter.is_floating_point():
            return parameter.device, parameter.dtype
    raise ValueError(f"{type(attention).__name__} has no floating-point weights: is it quantised?")
