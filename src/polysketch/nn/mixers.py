"""Layers by name: attention by every mechanism, and the one that stands in its place in BASED's models."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from polysketch import attention
from polysketch.attention import Mechanism
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.names import SHORT_CONVOLUTION, check_mixer_name
from polysketch.nn.self_attention import SelfAttention
from polysketch.nn.short_convolution import ShortConvolution


def mixer_class(name: str) -> type[Mechanism] | type[ShortConvolution]:
    """The class whose constructor takes the options of the layer `name`: a mechanism's, or `ShortConvolution`.

    Raises:
        ValueError: no such layer; the message lists them.
    """
    check_mixer_name(name)
    return ShortConvolution if name == SHORT_CONVOLUTION else attention.mechanism_class(name)


def check_mixer(name: str, options: Iterable[str]) -> None:
    """Refuse options that the layer `name` does not take.

    Raises:
        ValueError: an unknown layer or option; the message lists those that exist.
    """
    if mixer_class(name) is not ShortConvolution:
        return attention.check_options(name, options)
    known = [option for option in inspect.signature(ShortConvolution).parameters if option != "hidden_size"]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"layer {name!r} has no option {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")
    return None


def build_mixer(
    name: str,
    options: Mapping[str, Any],
    *,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    projection_convolution: int = 0,
    query_key_norm: bool = False,
    head_gate: bool = False,
    among_windows: bool = False,
) -> TokenMixer:
    """Make the layer called `name`: attention with its projections, or a short convolution.

    A mechanism draws its own weights from random numbers of its own. So two models of one seed that differ in their
    mechanism alone begin with the same weights everywhere else, and can be compared.

    Args:
        name: a key of `attention.MECHANISMS`, or `SHORT_CONVOLUTION`.
        options: constructor arguments of the mechanism or layer. A mechanism that takes `hidden_size`, because it may
            gate on the layer's input, is told it.
        hidden_size: width of input and output.
        num_heads, head_dim, num_kv_heads: as for `attention.build`; a short convolution has no heads.
        projection_convolution, query_key_norm, head_gate: what stands around a mechanism, as for `SelfAttention`;
            nothing around a short convolution.
        among_windows: whether other layers of the model have windows. Then all heads of a mechanism that
            `recalls_by_pairs` start with induction, for the windows find what is near.

    Raises:
        ValueError: an unknown name or option (the message lists those that exist), or sizes that do not fit.
        TypeError: an option of another type.
    """
    check_mixer(name, options)
    if name == SHORT_CONVOLUTION:
        return ShortConvolution(hidden_size, **options)
    width = {"hidden_size": hidden_size} if "hidden_size" in attention.option_names(name) else {}
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
    with _own_randomness():
        mechanism = attention.build(name, **{**sizes, **width, **options})
    return SelfAttention(
        hidden_size,
        mechanism,
        projection_convolution=projection_convolution,
        query_key_norm=query_key_norm,
        head_gate=head_gate,
        induction_every=1 if among_windows and mechanism.recalls_by_pairs else 2,
    )


@contextmanager
def _own_randomness() -> Iterator[None]:
    """What is drawn inside takes one number from the generators outside, however much it is."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds devices that come later too
        for _ in devices:
            torch.cuda.manual_seed(seed)
        yield
