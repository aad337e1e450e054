"""The table of mechanisms, and building one by name."""

import inspect
from collections.abc import Iterable
from typing import Any

from polysketch.attention.base import Mechanism
from polysketch.attention.based import BasedAttention
from polysketch.attention.focused import FocusedAttention
from polysketch.attention.hedgehog import HedgehogAttention
from polysketch.attention.hyper import HyperAttention
from polysketch.attention.landmark import NystromAttention, SkyformerAttention
from polysketch.attention.linear import LinearAttention
from polysketch.attention.llops import LlopsAttention
from polysketch.attention.local import LocalAttention
from polysketch.attention.performer import PerformerAttention
from polysketch.attention.polarity import PolarityAttention
from polysketch.attention.polynomial import PolynomialAttention
from polysketch.attention.polysketch import PolysketchAttention
from polysketch.attention.polysketch_delta import PolysketchDeltaAttention
from polysketch.attention.polysketch_heavy import PolysketchHeavyAttention
from polysketch.attention.polysketch_window import PolysketchWindowAttention
from polysketch.attention.sliding_window import SlidingWindowAttention
from polysketch.attention.softmax import SoftmaxAttention
from polysketch.attention.squared_polynomial import SquaredPolynomialAttention
from polysketch.attention.symmetric_power import SymmetricPowerAttention

MECHANISMS: dict[str, type[Mechanism]] = {
    "softmax": SoftmaxAttention,
    "polynomial": PolynomialAttention,
    "squared-polynomial": SquaredPolynomialAttention,
    "polysketch": PolysketchAttention,
    "polysketch-heavy": PolysketchHeavyAttention,
    "polysketch-delta": PolysketchDeltaAttention,
    "polysketch-window": PolysketchWindowAttention,
    "llops": LlopsAttention,
    "hyper": HyperAttention,
    "sliding-window": SlidingWindowAttention,
    "local": LocalAttention,
    "nystrom": NystromAttention,
    "skyformer": SkyformerAttention,
    "based": BasedAttention,
    "hedgehog": HedgehogAttention,
    "symmetric-power": SymmetricPowerAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "focused": FocusedAttention,
    "polarity": PolarityAttention,
}

_SIZES = ("self", "num_heads", "head_dim", "num_kv_heads")


def build(name: str, *, num_heads: int, head_dim: int, num_kv_heads: int | None = None, **options: Any) -> Mechanism:
    """Make the mechanism called `name`.

    Args:
        name: a key of `MECHANISMS`.
        num_heads: query heads.
        head_dim: width of one query or key head.
        num_kv_heads: key and value heads; `num_heads` when None.
        **options: constructor arguments of that mechanism; see `option_names(name)`.

    Raises:
        ValueError: an unknown name or option (the message lists those that exist), or sizes that do not fit.
        TypeError: an option of another type.
    """
    check_options(name, options)
    return mechanism_class(name)(num_heads, head_dim, num_kv_heads, **options)


def mechanism_class(name: str) -> type[Mechanism]:
    """The class called `name`.

    Raises:
        ValueError: no such mechanism; the message lists them.
    """
    if name not in MECHANISMS:
        raise ValueError(f"unknown attention mechanism {name!r}; known mechanisms: {', '.join(sorted(MECHANISMS))}")
    return MECHANISMS[name]


def option_names(name: str) -> tuple[str, ...]:
    """Names of the options the mechanism `name` takes, from its constructor's signature."""
    parameters = inspect.signature(mechanism_class(name).__init__).parameters
    return tuple(parameter for parameter in parameters if parameter not in _SIZES)


def check_options(name: str, options: Iterable[str]) -> None:
    """Refuse options the mechanism `name` does not take.

    Raises:
        ValueError: an unknown mechanism or option; the message lists those that exist.
    """
    known = option_names(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        listed = f"it takes {', '.join(known)}" if known else "it takes no options"
        meant = [option for option in known if any(part in option for part in unknown)]
        hint = f" (is {' or '.join(meant)} meant?)" if meant else ""
        raise ValueError(f"attention mechanism {name!r} has no option {', '.join(map(repr, unknown))}{hint}; {listed}")
