"""The cache of a model that reads one sequence and writes another: what was read of the source, and a state."""

from typing import Any

from torch import Tensor

from polysketch.integrations.huggingface.cache import PolysketchCache
from polysketch.models import GivenSource, TransformerEncoderDecoder


class PolysketchEncoderDecoderCache(PolysketchCache):
    """What `generate` carries from token to token: a `PolysketchCache` of the decoder, and what it read of the source.

    With attention on features on both ways its bytes depend on neither the source's length nor the target's. Mechanisms
    that keep keys and values (softmax) keep those of the source, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[Any] | None = None
        self._rows = 0

    @property
    def has_source(self) -> bool:
        """Whether a source was read."""
        return self._sources is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the state, of what is kept besides to go back to, and of what was read of the source."""
        return super().nbytes + sum(source.nbytes for source in self._sources or ())

    def keep_source(self, given: GivenSource) -> None:
        """Keep what a decoder has read of its source."""
        self._sources, self._rows = given.sources, given.rows

    def given(self, model: TransformerEncoderDecoder) -> GivenSource:
        """The decoder of `model` with the source that was read.

        Raises:
            ValueError: none was read.
        """
        if self._sources is None:
            raise ValueError("this cache has read no source: give input_ids or encoder_outputs with the first tokens")
        return GivenSource(model, self._sources, self._rows)

    def reset(self) -> None:
        """Back to before the source."""
        super().reset()
        self._sources = None

    def _select(self, indices: Tensor) -> None:
        super()._select(indices)
        if self._sources is not None:
            self._sources, self._rows = [source.reorder(indices) for source in self._sources], len(indices)
