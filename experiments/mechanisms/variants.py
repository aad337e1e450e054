"""Every causal mechanism of the library's table with its default options, brought down to a short sequence."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.foundation.variants import Variant
from polysketch import attention

NEARBY = ("local_chunk", "window", "chunk_size", "sample_size", "min_length")
"""Options that count nearby or sampled tokens: their defaults are as long as the whole sequence or longer."""


@dataclass(frozen=True)
class DefaultOptions(Variant):
    """A mechanism with its own default options, but `NEARBY` as many tokens as the task's local chunk."""

    @property
    def has_prefix(self) -> bool:
        """Nothing is removed after training here."""
        return False

    def attention_options(self, *, local_chunk: int, num_heads: int) -> dict[str, Any]:
        """What differs from the mechanism's defaults; plain JSON values.

        Args:
            local_chunk: tokens for each of `NEARBY` that the mechanism takes and that is not switched off by default.
            num_heads: of no consequence.
        """
        parameters = inspect.signature(attention.mechanism_class(self.attention)).parameters
        nearby = {name: local_chunk for name in NEARBY if name in parameters and parameters[name].default is not None}
        return {**nearby, **self.options}


# Made when this is imported: the experiments put a mechanism of their own into the table while they run.
VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        *(DefaultOptions(name, name, name) for name, kind in attention.MECHANISMS.items() if kind.is_causal),
        DefaultOptions("polysketch-gain", "polysketch, prefix_gain=0.8", "polysketch-paper", {"prefix_gain": 0.8}),
    )
}
"""Every causal name, and what the library advises for polysketch where recall matters; in the order of tables."""


def chosen(names: Iterable[str]) -> list[Variant]:
    """The variants called `names`, each once, in the order of `VARIANTS`.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    names = set(names)
    unknown = names - VARIANTS.keys()
    if unknown:
        raise ValueError(f"--only: unknown name {', '.join(sorted(unknown))}; known names: {', '.join(VARIANTS)}")
    return [variant for name, variant in VARIANTS.items() if name in names]
