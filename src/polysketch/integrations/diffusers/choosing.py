"""Processors for the attention layers of a model of diffusers."""

from typing import Any, Literal

from polysketch import attention
from polysketch.attention import Mechanism
from polysketch.integrations.diffusers.processor import MechanismProcessor

Layers = Literal["self", "cross", "all"]

_SOFTMAX = ("AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor", "SanaAttnProcessor2_0")
_REPLACEABLE = (*_SOFTMAX, "SanaLinearAttnProcessor2_0", MechanismProcessor.__name__)
"""Processors that do no more than ours around their attention. Others rotate, norm or add to it."""


def attention_processors(model: Any, name: str, *, layers: Layers = "self", **options: Any) -> dict[str, Any]:
    """What `model.set_attn_processor` takes: a mechanism in some layers, and in the others what is there.

    Cross-attention to a text of some tens of tokens costs little, so that self-attention alone is replaced by default.
    To load weights that were saved with processors, set processors of the same mechanism first.

    Args:
        model: of diffusers, with `attn_processors` and layers of `diffusers.models.attention_processor.Attention`.
        name: a key of `polysketch.attention.MECHANISMS` that sees both sides.
        layers: those of self-attention, those of cross-attention, or all.
        **options: of the mechanism; `polysketch.attention.option_names(name)` lists them.

    Returns:
        By the path of each layer's processor; a mechanism of its own, in the layer's device and dtype, for each layer.

    Raises:
        TypeError: an option of another type.
        ValueError: an unknown mechanism or option, one that is causal only or cannot cross, a model or a layer of
            another kind, a layer whose own processor does more than attend, or no layer of the kind that is asked for.
    """
    if layers not in ("self", "cross", "all"):
        raise ValueError(f"expected layers 'self', 'cross' or 'all', found {layers!r}")
    _check_mechanism(name, options)
    if not isinstance(getattr(model, "attn_processors", None), dict):
        raise ValueError(f"expected a model of diffusers with attn_processors, found {type(model).__name__}")
    processors = dict(model.attn_processors)
    attentions = {path: model.get_submodule(path.removesuffix(".processor")) for path in processors}
    chosen = {path: each for path, each in attentions.items() if layers in ("all", _kind(path, each))}
    if not chosen:
        raise ValueError(f"{type(model).__name__} has no attention layers of the kind {layers!r}")
    for path in chosen:
        _check_processor(path, processors[path])
    built = {path: MechanismProcessor(_built(path, each, name, options)) for path, each in chosen.items()}
    return {**processors, **built}


def _check_mechanism(name: str, options: dict[str, Any]) -> None:
    attention.check_options(name, options)
    if not attention.mechanism_class(name).is_bidirectional:
        both = ", ".join(attention.mechanisms_that("is_bidirectional"))
        raise ValueError(f"{name!r} is causal only, and here all tokens see one another; expected one of {both}")


def _kind(path: str, layer: Any) -> str:
    """Which kind of attention a layer is.

    Raises:
        ValueError: a layer of another class, or one that attends to two sequences at once.
    """
    if not all(hasattr(layer, part) for part in ("is_cross_attention", "inner_kv_dim", "to_q")):
        raise ValueError(f"expected a layer of diffusers' Attention at {path}, found {type(layer).__name__}")
    if layer.added_kv_proj_dim is not None:
        raise ValueError(f"the layer at {path} attends to two sequences at once, which no mechanism here does")
    return "cross" if layer.is_cross_attention else "self"


def _check_processor(path: str, processor: Any) -> None:
    if type(processor).__name__ not in _REPLACEABLE:
        raise ValueError(
            f"expected one of {', '.join(_REPLACEABLE)} at {path}, found {type(processor).__name__}, which may do more"
            " than attend, as turn queries and keys by their positions: leave such layers as they are"
        )


def _built(path: str, layer: Any, name: str, options: dict[str, Any]) -> Mechanism:
    head_dim = layer.inner_dim // layer.heads
    width = {"hidden_size": layer.query_dim} if "hidden_size" in attention.option_names(name) else {}
    sizes = {"num_heads": layer.heads, "head_dim": head_dim, "num_kv_heads": layer.inner_kv_dim // head_dim}
    mechanism = attention.build(name, **{**sizes, **width, **options})
    if layer.is_cross_attention and not mechanism.is_cross:
        raise ValueError(
            f"{name!r} with these options needs queries and keys of the same tokens: it cannot be at {path}; "
            f"mechanisms that can: {', '.join(attention.mechanisms_that_cross())}"
        )
    return mechanism.to(device=layer.to_q.weight.device, dtype=layer.to_q.weight.dtype)
