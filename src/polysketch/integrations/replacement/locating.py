"""Finding the attention layers of a transformers model, and what mechanisms need to know of them."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from polysketch.integrations.replacement.bookkeeping import SUBMODULE

_UNSERVED_ATTRIBUTES = ("sinks", "v_head_dim", "qk_head_dim", "qk_rope_head_dim")
_UNSERVED_SETTINGS = (
    "attn_logit_softcapping",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "add_cross_attention",
    "is_encoder_decoder",
    "reorder_and_upcast_attn",
    "use_bidirectional_attention",
)
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}

Layers = Literal["all"] | int | Sequence[int]


def plain_model(model: Any) -> PreTrainedModel:
    """The transformers model itself, out of a PEFT model that wraps it.

    Raises:
        TypeError: anything else than a transformers model.
    """
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model such as LlamaForCausalLM, got {type(model).__name__}; replace attention"
            " before torch.compile or any other wrapper"
        )
    return model


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: what runs the layers and makes their masks."""
    decoder: Any = model.base_model
    return decoder


def attention_layers(model: Any) -> dict[int, nn.Module]:
    """Layer index -> its attention module, in order, of a transformers model.

    Raises:
        TypeError: anything else than a transformers model.
        ValueError: an architecture in which not every layer has one self-attention of the known form.
    """
    model = plain_model(model)
    decoder = decoder_of(model)
    found = [module for module in decoder.modules() if _is_attention(module)]
    indices = _indices(found)
    expected = getattr(decoder.config, "num_hidden_layers", None)
    if expected is None or sorted(indices) != list(range(expected)):
        raise ValueError(
            f"{type(model).__name__} does not have one self-attention with a layer_idx in each of its {expected} layers"
            f" (found those of layers {sorted(indices)}), so its attention cannot be replaced here. Llama, Qwen3,"
            " GPT-2, Mistral, BERT, ModernBERT and ViT, and models built like them, can"
        )
    return dict(sorted(zip(indices, found, strict=True)))


def replaced_layers(model: Any) -> dict[int, nn.Module]:
    """Layer index -> its attention module, of the layers whose attention was replaced; none in an unmodified model."""
    found = attention_layers(model)
    return {index: module for index, module in found.items() if hasattr(module, SUBMODULE)}


def sees_both_sides(model: Any) -> bool:
    """Whether the model is an encoder, of which every token sees the whole sequence."""
    return not any(bool(module.is_causal) for module in attention_layers(model).values())


def _is_attention(module: nn.Module) -> bool:
    if "Attention" not in type(module).__name__ or not hasattr(module, "config"):
        return False
    if getattr(module, "is_causal", None) is False:  # an encoder's; those that hold such a module ask no registry
        return _head_dim(module) is not None and _asks_the_registry(type(module))
    return all(hasattr(module, name) for name in ("layer_idx", "head_dim", "is_causal", "scaling"))


def _indices(found: Sequence[nn.Module]) -> list[int]:
    """The numbers of attention layers: their own, or where they have none, by their order."""
    own = [getattr(module, "layer_idx", None) for module in found]
    return list(range(len(found))) if None in own else [int(index) for index in own]  # type: ignore[arg-type]


def _head_dim(attention: nn.Module) -> int | None:
    for name in ("head_dim", "attention_head_size"):
        if isinstance(getattr(attention, name, None), int):
            return int(getattr(attention, name))
    return None


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse a model whose attention does more than a mechanism can take the place of.

    Raises:
        ValueError: naming what the model has.
    """
    name, config = type(model).__name__, decoder_of(model).config
    if config.get_text_config(decoder=True) is not config:
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
    causal = {bool(module.is_causal) for module in found.values()}
    if len(causal) > 1 or (True in causal and not getattr(config, "is_causal", True)):
        raise ValueError(f"{name}'s attention is causal in some layers or calls alone, which cannot be replaced")


def _check_attention(name: str, module: nn.Module) -> None:
    for attribute in _UNSERVED_ATTRIBUTES:
        if hasattr(module, attribute):
            raise ValueError(f"{name}'s attention has {attribute}, which a replaced layer cannot honour")
    if not _asks_the_registry(type(module)):
        raise ValueError(
            f"{type(module).__name__} does not look its attention function up in transformers' AttentionInterface by"
            " the layer's configuration, so that a replacement would not be called"
        )


def _asks_the_registry(attention_class: type) -> bool:
    """Whether it looks its function up as every newer model of transformers does; read off the source, as there."""
    try:
        source = inspect.getsource(attention_class)
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source and "self.config._attn_implementation" in source


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
