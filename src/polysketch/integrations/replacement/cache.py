"""A mechanism's state as a layer of transformers' caches: constant where the mechanism's is."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from polysketch.attention import Mechanism
from polysketch.integrations.replacement.bookkeeping import SUBMODULE, Sees, record_of
from polysketch.integrations.replacement.locating import decoder_of, has_two_sides, plain_model, replaced_layers
from polysketch.integrations.replacement.source import HANDOVER, SourceLayer, mechanism_of


@dataclass(frozen=True)
class NewTokens:
    """What a mechanism's `extend` is given of the tokens of one call.

    Attributes:
        query, key, value, key_mask: as for `Mechanism.extend`.
        hidden, unrotated: likewise, where the mechanism reads them; else None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    hidden: Tensor | None = None
    unrotated: tuple[Tensor, Tensor] | None = None

    def extend(self, mechanism: Mechanism, state: Any) -> tuple[Tensor, Any]:
        """The output of the new tokens, and the state behind them."""
        read = {"hidden": self.hidden, "unrotated": self.unrotated}
        given: dict[str, Any] = {name: each for name, each in read.items() if each is not None}
        return mechanism.extend(self.query, self.key, self.value, state, key_mask=self.key_mask, **given)

    def first(self, tokens: int) -> "NewTokens":
        """The first so many of them."""
        heads = (self.query, self.key, self.value, *(self.unrotated or ()))
        query, key, value, *unrotated = (each[:, :, :tokens] for each in heads)
        mask, hidden = (None if each is None else each[:, :tokens] for each in (self.key_mask, self.hidden))
        return NewTokens(query, key, value, mask, hidden, (unrotated[0], unrotated[1]) if unrotated else None)


class StateLayer(CacheLayerMixin):
    """The state of one replaced layer.

    A layer of a cache is given keys and values before the attention function is given the query. So `update` keeps
    nothing: it returns the new keys and values alone, the keys bearing a reference to this layer, by which the
    attention function finds it and calls `attend`.

    Args:
        attention: the replaced attention layer.
    """

    is_sliding: ClassVar[bool] = False
    supports_early_init = False

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mechanism: Mechanism = mechanism_of(attention)
        self.state: Any = None
        self.length = 0
        self.padding: Tensor | None = None  # (batch,) int64: tokens of each row that were no real ones; None where none
        self._awaited = False
        self._recording = False
        self._last: tuple[Any, Tensor | None, NewTokens] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the state before the first token, for as many rows as the keys have."""
        self.state = self.mechanism.init_state(key_states.shape[0], key_states.device, key_states.dtype)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens, and send the keys on to the attention function with a reference to this layer.

        Raises:
            ValueError: the layer's attention was restored or replaced again since the cache was made.
        """
        if getattr(self.attention, SUBMODULE, None) is not self.mechanism:
            raise ValueError(
                "this cache holds states of attention that was restored or replaced since: begin with a new cache"
            )
        if self._awaited:
            raise ValueError(
                "the tokens that this cache was last given were never attended to: it was passed to a model without"
                " replaced attention, or an error stopped the model; begin with a new cache"
            )
        self._awaited = True
        self.length += key_states.shape[2]
        setattr(key_states, HANDOVER, self)
        return key_states, value_states

    def attend(self, attention: nn.Module, tokens: "NewTokens") -> Tensor:
        """The mechanism's `extend` by the new tokens: (batch, num_heads, new tokens, head_dim).

        Raises:
            ValueError: the cache of another model, or an architecture whose layers attend twice with the same keys.
        """
        if attention is not self.attention:
            raise ValueError("this cache was made for another model's layer: begin with a new cache")
        if not self._awaited:
            raise ValueError(
                f"{type(attention).__name__} attends more than once with the same keys, of which a state would be given"
                " each token as often: call the model with use_cache=False"
            )
        self._awaited = False
        if not self.is_initialized:
            self.lazy_initialization(tokens.key, tokens.value)
        if self._recording:
            self._last = (self.state.clone(), self.padding, tokens)
        return self._read(tokens)

    def _read(self, tokens: "NewTokens") -> Tensor:
        output, self.state = tokens.extend(self.mechanism, self.state)
        if tokens.key_mask is not None:
            padding = (~tokens.key_mask).sum(1)
            self.padding = padding if self.padding is None else self.padding + padding
        return output

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first token."""
        return 0 if self.state is None else self.state.nbytes

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a layer that holds all tokens has it: masks made by it also serve layers that were not replaced."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.length

    def get_max_length(self) -> int:
        """None, which is -1 in transformers."""
        return -1

    def reset(self) -> None:
        """Back to before the first token."""
        self.state, self.length, self.padding, self._last = None, 0, None, None
        self.is_initialized = self._awaited = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows `beam_idx` (int64), repeats allowed."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)
        if self.padding is not None:
            self.padding = self.padding[beam_idx.to(self.padding.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times in a row."""
        if self.state is not None:
            self.reorder_cache(torch.arange(self.state.position.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.reorder_cache(indices)

    def activate_past_recording(self) -> None:
        """Keep what the last call needs to be taken back, from now on: a clone of the state and that call's tensors."""
        self._recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens of the last call.

        Args:
            tokens_to_remove: minus the number of tokens; or, above 0, the number that shall stay, as transformers has
                it until its version 5.18.

        Raises:
            RuntimeError: `activate_past_recording` was not called before, or more tokens than the last call had.
        """
        given = int(tokens_to_remove)
        remove = max(0, self.length - given) if given > 0 else -given
        if given == 0:
            self._last = None
        if remove == 0:
            return
        if self._last is None:
            raise RuntimeError(
                "a state cannot give tokens back unless it records them: for assisted generation, pass"
                " past_key_values=polysketch.replacement_cache(model) to generate; a model with replaced attention"
                " cannot be the assistant of another"
            )
        state, padding, tokens = self._last
        last = tokens.query.shape[2]
        if remove > last:
            raise RuntimeError(f"only the {last} tokens of the last call can be taken back, got {remove}")
        self.state, self.padding = state, padding
        if remove < last:
            self._read(tokens.first(last - remove))
        self.length -= remove
        self._last = None

    def offload(self) -> None:
        """Stay where it is: a state of constant size is not worth the way."""

    def prefetch(self) -> None:
        """It is there already."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateLayer":
        """A clone of the state for the same model: caches are copied to continue a prompt in several ways."""
        other = StateLayer(self.attention)
        other.length, other.is_initialized, other._recording = self.length, self.is_initialized, self._recording
        other.state = None if self.state is None else self.state.clone()
        other.padding = self.padding  # never changed in place
        if self._last is not None:
            state, *before = self._last
            other._last = (state.clone(), *before)
        memo[id(self)] = other
        return other

    def __repr__(self) -> str:
        return f"StateLayer({type(self.mechanism).__name__}, tokens={self.length}, nbytes={self.nbytes})"


def state_layer_of(key: Tensor) -> StateLayer | SourceLayer | None:
    """The layer of the cache that these keys came through; None without a cache, or with another kind of layer."""
    return getattr(key, HANDOVER, None)


def replacement_cache(model: Any) -> DynamicCache | EncoderDecoderCache:
    """An empty cache for `model`: states in replaced layers, growing keys and values in the others.

    Of a model with an encoder and a decoder it is two in one: of the decoder's tokens, and of what it has read of the
    encoder's.

    `model.generate` makes one by itself; make one to keep it over several turns, or for assisted generation, which
    takes back the tokens it does not accept. `copy.deepcopy` of it continues a prompt in several ways.

    Args:
        model: after `replace_attention`.

    Raises:
        TypeError: not a transformers model.
        ValueError: nothing was replaced in it.
    """
    model = plain_model(model)
    decoder = decoder_of(model)
    if not replaced_layers(model):
        raise ValueError("no attention was replaced in this model: call replace_attention first, or use DynamicCache")
    if has_two_sides(model):
        cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
    else:
        cache = DynamicCache(config=decoder.config)
    give_states(decoder, cache)
    return cache


def give_states(decoder: Any, cache: Any) -> None:
    """Put states into an empty cache, in place, for the replaced layers; a cache that has them stays as it is.

    Raises:
        TypeError: a cache of another kind than DynamicCache, or two of them for a decoder that looks at an encoder.
        ValueError: a cache with tokens that the states have not seen.
    """
    sources = _replaced(decoder, "source")
    if isinstance(cache, EncoderDecoderCache):
        _give(cache.cross_attention_cache, sources, SourceLayer)
        _give(cache.self_attention_cache, _replaced(decoder, "past"), StateLayer)
        return
    if sources:
        raise TypeError(
            f"a decoder that looks at an encoder decodes with an EncoderDecoderCache, got {type(cache).__name__}:"
            " leave past_key_values out, or pass polysketch.replacement_cache(model)"
        )
    _give(cache, _replaced(decoder, "past"), StateLayer)


def _replaced(decoder: Any, sees: Sees) -> dict[int, nn.Module]:
    """Place in a cache -> the attention, of the replaced layers that see this."""
    records = ((record_of(module), module) for module in decoder.modules())
    return {
        record.slot: module
        for record, module in records
        if record is not None and record.replacement is not None and record.sees == sees
    }


def _give(cache: Any, layers: dict[int, nn.Module], kind: type[StateLayer] | type[SourceLayer]) -> None:
    if isinstance(cache, Cache) and any(isinstance(layer, kind) for layer in cache.layers):
        return  # it was given its states at its first tokens
    if not isinstance(cache, Cache) or not _grows(cache):
        raise TypeError(
            f"replaced attention decodes with a DynamicCache, in which its layers' states take their places, got "
            f"{type(cache).__name__}: leave out cache_implementation, or pass polysketch.replacement_cache(model)"
        )
    while len(cache.layers) <= max(layers, default=-1):
        cache.layers.append(DynamicLayer())
    for index, attention in layers.items():
        layer: Any = cache.layers[index]
        if layer.get_seq_length():
            raise ValueError(
                f"layer {index} of this cache holds {layer.get_seq_length()} tokens as keys and values, of which the"
                " replaced attention has no state: begin with past_key_values=polysketch.replacement_cache(model), or"
                " an empty DynamicCache"
            )
        cache.layers[index] = kind(attention)


def give_states_before_forward(
    decoder: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook: any cache that is passed to the model gets the states it needs.

    Where the caller asks for a cache by `use_cache=True` and gives none, a decoder alone gets one that has states,
    unless it is observed or a gradient is wanted. Else nothing happens.
    """
    cache = keywords.get("past_key_values", next((each for each in arguments if isinstance(each, Cache)), None))
    if cache is not None:
        give_states(decoder, cache)
        return None
    if keywords.get("use_cache") is not True or torch.is_grad_enabled() or len(arguments) > 1:
        return None  # beyond the tokens, an argument given by position may be the cache
    if getattr(decoder.config, "is_encoder_decoder", False) or _is_observed(decoder):
        return None
    made = DynamicCache(config=decoder.config)
    give_states(decoder, made)
    return arguments, {**keywords, "past_key_values": made}


def _is_observed(decoder: Any) -> bool:
    records = (record_of(module) for module in decoder.modules())
    return any(record is not None and record.model.observer is not None for record in records)


def _grows(cache: Cache) -> bool:
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return isinstance(cache, DynamicCache) and all(type(layer) in kinds for layer in cache.layers)
