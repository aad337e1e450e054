"""The ways to attend that can be timed, by name: those of `VARIANTS`, and every mechanism of the library's table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from polysketch.benchmarking import calls, floors, mechanisms
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape

BASELINE = "sdpa"
"""What every other variant is compared with: PyTorch's scaled_dot_product_attention."""

_MECHANISM = "mechanism "


@dataclass(frozen=True)
class Sizes:
    """What an attention call has besides its shape.

    Attributes:
        sketch_size: number of features.
        local: tokens of an exact chunk.
        backend: of `linear_attention` with features given; whole mechanisms choose their own ("auto").
    """

    sketch_size: int = 32
    local: int = 256
    backend: str = "auto"


@dataclass(frozen=True)
class Variant:
    """One way to attend.

    Attributes:
        title: in tables and plots.
        prepare: (shape, device, dtype, sizes) -> Call with random inputs.
        floor: (shape, sizes, backward=, itemsize=) -> Floor, or None where it is not counted.
        prepare_check: as `prepare`, for comparing with the definition; None where the result is not ours.
        linear: whether it runs `linear_attention`.
        any_backend: whether `prepare_check` takes the backend of `linear_attention` from the sizes.
    """

    title: str
    prepare: Callable[[Shape, torch.device, torch.dtype, Sizes], Call]
    floor: Callable[..., Floor | None]
    prepare_check: Callable[[Shape, torch.device, torch.dtype, Sizes], Call] | None = None
    linear: bool = False
    any_backend: bool = False


def _sdpa(shape: Shape, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Call:
    return calls.sdpa(shape, device, dtype)


def _given(shape: Shape, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Call:
    sketch_size, local = sizes.sketch_size, sizes.local
    return calls.linear(shape, device, dtype, sketch_size=sketch_size, local=local, backend=sizes.backend)


def _polysketch(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
    *,
    learned: bool,
    prefix_gain: float | None = None,
) -> Call:
    make = partial(calls.polysketch, learned=learned, prefix_gain=prefix_gain)
    return make(shape, device, dtype, sketch_size=sizes.sketch_size, local=sizes.local)


def _polynomial(shape: Shape, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Call:
    return calls.polynomial(shape, device, dtype)


def _exact_floor(shape: Shape, sizes: Sizes, *, backward: bool, itemsize: int) -> Floor:
    return floors.exact_attention(shape, backward=backward, itemsize=itemsize)


def _given_floor(shape: Shape, sizes: Sizes, *, backward: bool, itemsize: int) -> Floor:
    return floors.linear_attention(shape, sizes.sketch_size, sizes.local, backward=backward, itemsize=itemsize)


def _polysketch_floor(shape: Shape, sizes: Sizes, *, backward: bool, itemsize: int, learned: bool) -> Floor:
    count = partial(floors.polysketch, backward=backward, itemsize=itemsize, learned=learned)
    return count(shape, sizes.sketch_size, sizes.local)


def _whole(title: str, *, learned: bool) -> Variant:
    """The mechanism; checked with a gain that gives half of the attention mass to the sketched part."""
    return Variant(
        title,
        partial(_polysketch, learned=learned),
        partial(_polysketch_floor, learned=learned),
        partial(_polysketch, learned=learned, prefix_gain=0.5),
        linear=True,
    )


VARIANTS: dict[str, Variant] = {
    "sdpa": Variant("sdpa", _sdpa, _exact_floor),
    "given": Variant("features given", _given, _given_floor, _given, linear=True, any_backend=True),
    "learned": _whole("learned sketch", learned=True),
    "random": _whole("random sketch", learned=False),
    "polynomial": Variant("exact polynomial", _polynomial, _exact_floor, _polynomial),
}


def mechanism_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The names, for `variant`, of mechanisms of the library's table.

    Args:
        texts: name, name:option=value,option=value, or all.

    Raises:
        ValueError: an unknown mechanism or option.
    """
    return tuple(_MECHANISM + text for text in mechanisms.expanded(texts))


def _of_table(text: str) -> Variant:
    """A mechanism of the library's table; bidirectional where it cannot be causal, and then its title says so."""

    def prepare(shape: Shape, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Call:
        return mechanisms.prepare(text, shape, device, dtype)

    def prepare_check(shape: Shape, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Call:
        return mechanisms.prepare_check(text, shape, device, dtype, local=sizes.local, backend=sizes.backend)

    def floor(shape: Shape, sizes: Sizes, *, backward: bool, itemsize: int) -> Floor | None:
        return mechanisms.floor(text, shape, backward=backward, itemsize=itemsize)

    title = text if mechanisms.is_causal(text) else f"{text} (bidirectional)"
    over_features = mechanisms.is_over_features(text)
    return Variant(title, prepare, floor, prepare_check, linear=over_features, any_backend=over_features)


def variant(name: str) -> Variant:
    """The variant called `name`, or the mechanism, called as by `mechanism_names`.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    if name.startswith(_MECHANISM):
        return _of_table(name.removeprefix(_MECHANISM))
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}; expected {', '.join(VARIANTS)}")
    return VARIANTS[name]
