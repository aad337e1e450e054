"""The configuration of a model: everything needed to build it again, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from polysketch.models.layers import check_layer, layer_names, layer_options, windows_between
from polysketch.models.presets import PRESETS
from polysketch.nn import gated_width
from polysketch.ops.arguments import check_at_least_one

_MOST_LAYERS = 2**20  # a list as long is made
_SIZES = ("vocab_size", "num_layers", "hidden_size", "num_heads", "head_dim", "num_kv_heads", "feedforward_size")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and mechanisms of a `TransformerLM`. Sizes left as None are filled in, so a saved one is explicit.

    Attributes:
        vocab_size: number of token ids.
        num_layers: transformer blocks.
        hidden_size: width of the residual stream; even.
        num_heads: query heads of a layer.
        head_dim: width of a head, even; hidden_size / num_heads when None.
        num_kv_heads: key and value heads, a divisor of num_heads; num_heads when None.
        attention: name of the mechanism, or of a layer without attention ("short-convolution"); or a
            pattern of names, repeated over the layers, whose length divides their number: ("based", "sliding-window")
            alternates.
        attention_options: options of the mechanism; with a pattern, the options of each mechanism under its name,
            {"sliding-window": {"window": 64}}; or a pattern of dictionaries, repeated likewise.
        attention_every: the mechanism stands in every such layer, counted from the last: 4 is the last of each four.
            The others are softmax over a window ("sliding-window"), of as many tokens as the mechanism's `window`, 256
            where its options name none. 1: in every layer.
        feedforward_size: inner width of the gated linear unit; 8/3 of hidden_size, in eights, when None.
        rotary: rotary positions in the heads of every layer (True), of none (False), or of the named mechanisms.
        input_positions: add sinusoidal positions to the embedded tokens.
        rope_base: base of the rotary positions' frequencies.
        norm_epsilon: of the layer norms.
        projection_convolution: taps of a short causal convolution of queries, keys and values, for every layer with
            attention; 0 for none, 4 is usual. Not to be confused with the layer "short-convolution", or with the
            convolutions that are part of a mechanism.
        query_key_norm: root mean square norm of the queries and keys of every head, before rotary positions.
        head_gate: a sigmoid gate on the output of every head, from the layer's input.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a field out of range, sizes that do not divide, an unknown mechanism or option, a mechanism that
            cannot be causal, or a pattern that does not divide the layers.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    # Filled in when None, so that readers find integers.
    head_dim: int = None  # type: ignore[assignment]
    num_kv_heads: int = None  # type: ignore[assignment]
    attention: str | tuple[str, ...] = "polysketch"
    attention_options: dict[str, Any] | tuple[dict[str, Any], ...] = field(default_factory=dict)
    feedforward_size: int = None  # type: ignore[assignment]
    rotary: bool | tuple[str, ...] = True
    input_positions: bool = True
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    projection_convolution: int = 0
    query_key_norm: bool = False
    head_gate: bool = False
    attention_every: int = 1

    def __post_init__(self) -> None:
        given = ("vocab_size", "num_layers", "hidden_size", "num_heads")
        check_at_least_one(**{name: getattr(self, name) for name in given})
        if self.num_layers > _MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {_MOST_LAYERS:,}, got {self.num_layers}")
        self._fill_sizes()
        check_at_least_one(attention_every=self.attention_every, **{name: getattr(self, name) for name in _SIZES})
        self._check_heads()
        self._check_scalars()
        for name in ("attention", "attention_options", "rotary"):
            self._set(name, _frozen(getattr(self, name)))
        self._check_every()
        for layer, options in self.layers():
            self._check_layer(layer, options)
        self._check_positions()
        self._check_around_attention()

    def layers(self) -> list[tuple[str, dict[str, Any]]]:
        """The mechanism's name and options of each layer."""
        names = layer_names(self.attention, self.num_layers)
        options = layer_options(self.attention_options, names, by_name=not isinstance(self.attention, str))
        layers = list(zip(names, options, strict=True))
        return windows_between(layers, self.attention_every)

    def rotates(self, name: str) -> bool:
        """Whether layers of the mechanism `name` have rotary positions."""
        return self.rotary if isinstance(self.rotary, bool) else name in self.rotary

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; `from_dict` gives an equal configuration back."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration `to_dict` wrote.

        Raises:
            ValueError: keys that are not fields, by name, or required fields that are missing.
        """
        known = [one.name for one in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(f"unknown model option {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
        missing = [name for name in known[:4] if name not in values]
        if missing:
            raise ValueError(f"a model configuration needs {', '.join(missing)}")
        return cls(**values)

    def _check_layer(self, name: str, options: Mapping[str, Any]) -> None:
        check_layer(name, options)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen for everyone else

    def _fill_sizes(self) -> None:
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_heads, got {self.hidden_size} and {self.num_heads};"
                    " or give head_dim"
                )
            self._set("head_dim", self.hidden_size // self.num_heads)
        if self.num_kv_heads is None:
            self._set("num_kv_heads", self.num_heads)
        if self.feedforward_size is None:
            self._set("feedforward_size", gated_width(self.hidden_size))

    def _check_heads(self) -> None:
        for name in ("hidden_size", "head_dim"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even, for positions are pairs, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )

    def _check_every(self) -> None:
        if self.attention_every > 1 and not isinstance(self.attention, str):
            raise ValueError(
                f"attention_every expects one mechanism, got the pattern {', '.join(map(str, self.attention))}: write "
                "the windows into the pattern, or leave attention_every out"
            )

    def _check_around_attention(self) -> None:
        taps = self.projection_convolution
        if isinstance(taps, bool) or not isinstance(taps, int):
            raise TypeError(f"projection_convolution must be an integer, its number of taps, got {taps!r}")
        if taps < 0:
            raise ValueError(f"projection_convolution must be a number of taps, or 0 for none, got {taps}")
        self._check_switch("query_key_norm")
        self._check_switch("head_gate")

    def _check_switch(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")

    def _check_positions(self) -> None:
        self._check_switch("input_positions")
        if not isinstance(self.rotary, bool | tuple):
            raise TypeError(f"rotary must be true, false, or a list of mechanisms, got {self.rotary!r}")
        layers = list(dict.fromkeys(name for name, _ in self.layers()))
        for name in () if isinstance(self.rotary, bool) else self.rotary:
            if name not in layers:
                raise ValueError(f"rotary names {name!r}, and no layer is one; the layers are {', '.join(layers)}")

    def _check_scalars(self) -> None:
        for name in ("rope_base", "norm_epsilon"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")
            self._set(name, float(value))


def require_configuration(config: Any, kind: type) -> None:
    """Refuse the name of a preset, or anything else, in place of a configuration.

    Args:
        config: what a model was asked for with.
        kind: the class of configuration that it takes.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(config, kind):
        named = (
            f": polysketch.models.preset({config!r}) is one" if kind is ModelConfig and config in (*PRESETS,) else ""
        )
        raise TypeError(f"config must be a {kind.__name__}, got {type(config).__name__}{named}")


def _frozen(value: Any) -> Any:
    """A pattern as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Tuples as lists and dictionaries copied, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
