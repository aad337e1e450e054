"""The mechanisms that are compared, with the same names in every experiment, table and plot."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polysketch import attention
from polysketch.attention import PolysketchPaperAttention

SKETCH_SIZE = 32
_SMALL_SHARE, _LARGE_SHARE = 0.05, 0.95


class LocalChunks(PolysketchPaperAttention):
    """Exact polynomial attention inside aligned chunks and nothing beyond: polysketch trained without its prefix.

    The sketch is random and of size 1, so that it has no weights and costs next to nothing.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        local_chunk: tokens of a chunk.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, local_chunk: int) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads, learned=False, sketch_size=1, local_chunk=local_chunk)
        self.remove_prefix()

    @property
    def has_prefix(self) -> bool:
        """There is none to measure or to remove."""
        return False


@contextlib.contextmanager
def experiment_mechanisms() -> Iterator[None]:
    """Put `LocalChunks` into the library's table inside, so that configurations and run folders can name it."""
    attention.MECHANISMS["local-chunks"] = LocalChunks
    try:
        yield
    finally:
        attention.MECHANISMS.pop("local-chunks")


@dataclass(frozen=True)
class Variant:
    """One mechanism under comparison.

    Attributes:
        name: what `--only` takes, and the name of its files.
        label: what tables and plots say.
        attention: name of the mechanism.
        options: its options besides the local chunk.
        shares: initial prefix shares, dealt out evenly over the heads; empty for none.
    """

    name: str
    label: str
    attention: str
    options: dict[str, Any] = field(default_factory=dict)
    shares: tuple[float, ...] = ()

    @property
    def has_prefix(self) -> bool:
        """Whether removing the prefix means anything."""
        return self.attention == "polysketch-paper"

    def attention_options(self, *, local_chunk: int, num_heads: int) -> dict[str, Any]:
        """The mechanism's options for a model with `num_heads` heads; plain JSON values.

        Args:
            local_chunk: tokens of a chunk with exact weights; ignored by mechanisms without one.
            num_heads: key/value heads of a layer, over which the shares are dealt out.
        """
        if self.attention == "softmax":
            return {}
        gain = {"prefix_gain": _dealt_out(self.shares, num_heads)} if self.shares else {}
        return {"local_chunk": local_chunk, **self.options, **gain}


def _dealt_out(shares: Sequence[float], num_heads: int) -> float | list[float]:
    """One share for all, or the list in which each share has its run of heads."""
    if len(shares) == 1:
        return shares[0]
    return [shares[head * len(shares) // num_heads] for head in range(num_heads)]


def _learned(name: str, label: str, *shares: float) -> Variant:
    options = {"sketch_size": SKETCH_SIZE, "learned": True, "prefix_gain": None}
    return Variant(name, f"learned + local, {label}", "polysketch-paper", options, shares)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("softmax", "softmax", "softmax"),
        _learned("no-gain", "paper's scale"),
        _learned("gain-0.5", "prefix share 0.5", 0.5),
        _learned("gain-0.8", "prefix share 0.8", 0.8),
        _learned("gain-0.99", "prefix share 0.99", 0.99),
        _learned("halves", f"prefix shares {_SMALL_SHARE:g} and {_LARGE_SHARE:g}", _SMALL_SHARE, _LARGE_SHARE),
        Variant("random", "random + local", "polysketch-paper", {"sketch_size": SKETCH_SIZE, "learned": False}),
        Variant("local", "local chunks alone", "local-chunks"),
    )
}
"""Every variant by name, in the order of tables."""


def chosen(names: Iterable[str]) -> list[Variant]:
    """The variants called `names`, each once, in the order of `VARIANTS`.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    names = set(names)
    unknown = names - VARIANTS.keys()
    if unknown:
        raise ValueError(f"--only: unknown variant {', '.join(sorted(unknown))}; known variants: {', '.join(VARIANTS)}")
    return [variant for name, variant in VARIANTS.items() if name in names]
