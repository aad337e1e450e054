"""What a decoder has read of its encoder, as a layer of transformers' caches: constant where the mechanism's is."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from polysketch.attention import Mechanism
from polysketch.integrations.replacement.bookkeeping import SUBMODULE

HANDOVER = "_polysketch_layer"
"""The name under which keys bear a reference to the layer of a cache that they came through."""


def mechanism_of(attention: nn.Module) -> Mechanism:
    """What took the place of the layer's attention."""
    mechanism = getattr(attention, SUBMODULE)
    assert isinstance(mechanism, Mechanism)
    return mechanism


class SourceLayer(CacheLayerMixin):
    """What one replaced layer has read of the encoder's tokens.

    A decoder gives a cache the encoder's keys and values with its first tokens, and asks for them with all others. So
    `update` sends the keys on to the attention function with a reference to this layer, and afterwards `keys` are empty
    ones that bear the same.

    Args:
        attention: the replaced attention layer.
    """

    is_sliding: ClassVar[bool] = False
    supports_early_init = False
    keys: Any
    values: Any

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.mechanism = attention, mechanism_of(attention)
        self.source: Any = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Keep empty keys and values of as many rows."""
        self._stand_in(key_states[:, :, :0], value_states[:, :, :0])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the encoder's tokens, and send their keys on to the attention function.

        Raises:
            ValueError: a source was read already, or the layer's attention was restored or replaced again.
        """
        if self.source is not None:
            raise ValueError("this cache has read a source: begin with a new cache for another one")
        if getattr(self.attention, SUBMODULE, None) is not self.mechanism:
            raise ValueError(
                "this cache holds states of attention that was restored or replaced since: begin with a new cache"
            )
        self.length = key_states.shape[2]
        self.lazy_initialization(key_states, value_states)
        setattr(key_states, HANDOVER, self)
        return key_states, value_states

    def attend(self, attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, key_mask: Any) -> Tensor:
        """The mechanism's `ask_source`, behind its `read_source` at the first call: as the queries.

        Raises:
            ValueError: the cache of another model.
        """
        if attention is not self.attention:
            raise ValueError("this cache was made for another model's layer: begin with a new cache")
        if self.source is None:
            self.source = self.mechanism.read_source(key, value, key_mask=key_mask)
        return self.mechanism.ask_source(query, self.source)

    @property
    def nbytes(self) -> int:
        """Bytes of what was read; 0 before."""
        return 0 if self.source is None else self.source.nbytes

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a layer that holds the encoder's tokens has it."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Tokens of the encoder."""
        return self.length

    def get_max_length(self) -> int:
        """None, which is -1 in transformers."""
        return -1

    def reset(self) -> None:
        """Back to before the source."""
        self.source, self.length, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows `beam_idx` (int64), repeats allowed."""
        if self.source is not None:
            self.source = self.source.reorder(beam_idx)
            self._stand_in(*(x.index_select(0, beam_idx.to(x.device)) for x in (self.keys, self.values)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times in a row."""
        if self.source is not None:
            self.reorder_cache(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.reorder_cache(indices)

    def offload(self) -> None:
        """Stay where it is: a source of constant size is not worth the way."""

    def prefetch(self) -> None:
        """It is there already."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "SourceLayer":
        """What was read, for the same model."""
        other = SourceLayer(self.attention)
        other.length, other.is_initialized = self.length, self.is_initialized
        if self.source is not None:
            other.source = self.source.clone()
            other._stand_in(self.keys, self.values)
        memo[id(self)] = other
        return other

    def _stand_in(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys.clone(), values.clone()
        setattr(self.keys, HANDOVER, self)

    def __repr__(self) -> str:
        return f"SourceLayer({type(self.mechanism).__name__}, tokens={self.length}, nbytes={self.nbytes})"
