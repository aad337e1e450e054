"""What an attention layer was given, handed on to its attention function, which transformers gives the heads alone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

OPTION = "polysketch_layer_inputs"
"""The option under which it travels: attention layers pass options that they do not know on to the function."""

_HIDDEN = "hidden_states"


class LayerInputs(NamedTuple):
    """What mechanisms may read beside queries, keys and values.

    Attributes:
        hidden: (batch, new tokens, hidden_size), the layer's input.
        positions: cosines and sines of rotary positions, (1 or batch, new tokens, turned width) each, as the
            architecture gives them to its layers; None, or of another form, in others.
        look: what to call with index, layer, query, key and positions in place of attention, which then gives zeros;
            None to attend.
    """

    hidden: Tensor
    positions: Any
    look: Callable[[int, nn.Module, Tensor, Tensor, Any], None] | None = None


def layer_inputs(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> LayerInputs:
    """From what an attention layer was called with."""
    hidden = arguments[0] if arguments else keywords[_HIDDEN]
    return LayerInputs(hidden, keywords.get("position_embeddings"))


def with_hidden(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the layer with for another input."""
    if arguments:
        return (hidden, *arguments[1:]), dict(keywords)
    return arguments, {**keywords, _HIDDEN: hidden}


def hand_on(
    layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hook of a layer whose mechanism reads more than queries, keys and values. Other layers have none."""
    return arguments, {**keywords, OPTION: layer_inputs(arguments, keywords)}
