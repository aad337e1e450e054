"""What a replaced model remembers, so that its attention functions find their way and the replacement can be undone."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

IMPLEMENTATION = "polysketch"
"""The name under which the attention function and the mask function are registered."""

SUBMODULE = "polysketch"
"""The name of the mechanism in its attention layer: `layer.self_attn.polysketch`."""

CONFIG_KEY = "polysketch_attention"
"""The entry of a model's configuration that says what was replaced; it is saved with the model."""

Sees = Literal["past", "both", "source"]
"""What a token attends to: the tokens before it; the whole sequence, in an encoder; or another one, the encoder's."""

_RECORD = "_polysketch_record"


@dataclass
class ModelRecord:
    """What the layers of one model share.

    Attributes:
        implementation: the model's own attention, "sdpa" for instance; layers that were not replaced compute it.
        config: the model's configuration, which says what was replaced.
        stacks: the configurations by which masks and layers find their attention functions, that of the encoder and
            that of the decoder where there are both, and what each named before.
        observer: what to call in place of replaced attention; None to compute it.
        around: gives a context in which a layer's attention function runs, replaced or not; None for none.
        hook: the handle of the hook that gives caches their states.
    """

    implementation: str
    config: Any
    stacks: list[tuple[Any, str]]
    observer: Callable[[Any], Any] | None = None
    around: Callable[[int], AbstractContextManager[Any]] | None = None
    hook: Any = None


@dataclass(frozen=True)
class Replacement:
    """What one layer's attention was replaced by.

    Attributes:
        name, options: of the mechanism, as for `polysketch.attention.build`.
        sliding_window: "refuse" sequences longer than the window that the layer had, or "ignore" it.
        dropout: "refuse" attention dropout in training, or "ignore" it.
        position_bias: "refuse" layers that add a bias of positions to their scores, as T5's, or "ignore" it.
        softcap: "refuse" layers that cap their scores, as Gemma 2's, or "ignore" it.
    """

    name: str
    options: Mapping[str, Any]
    sliding_window: str
    dropout: str
    position_bias: str = "refuse"
    softcap: str = "refuse"


@dataclass
class LayerRecord:
    """What one attention layer remembers.

    Attributes:
        index: of the layer in the model.
        model: what all layers share.
        sees: what its tokens attend to.
        slot: its place in a cache of the decoder.
        config: the object that it had.
        replacement: None in a layer that keeps its own attention.
        given: what the mechanism is given beside query, key and value: some of "hidden" and "unrotated".
        hook: the handle of the hook that hands on what the layer was given; None where the mechanism is given no more.
    """

    index: int
    model: ModelRecord
    sees: Sees
    slot: int
    config: Any
    replacement: Replacement | None = None
    given: tuple[str, ...] = ()
    hook: Any = None


def record_of(attention: nn.Module) -> LayerRecord | None:
    """What the attention layer remembers; None in a model in which nothing was replaced."""
    return getattr(attention, _RECORD, None)


def remember(attention: nn.Module, record: LayerRecord | None) -> None:
    """Give the attention layer its record, or take it away with None; the hook of an earlier one goes with it."""
    earlier = record_of(attention)
    if earlier is not None and earlier.hook is not None:
        earlier.hook.remove()
    if record is not None:
        setattr(attention, _RECORD, record)
    elif hasattr(attention, _RECORD):
        delattr(attention, _RECORD)
