"""The hidden states between blocks, for those who ask transformers for `output_hidden_states`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


def takes_hidden_states(others: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether they are asked for, by the argument, which is taken out of `others`, or else by the configuration."""
    asked = others.pop("output_hidden_states", None)
    return bool(getattr(config, "output_hidden_states", False) if asked is None else asked)


class BetweenBlocks:
    """What went into each block while it was watched.

    Every way through a block, whole or token by token, begins with its norm before attention; so the input of that norm
    is what the block was given.
    """

    def __init__(self) -> None:
        self._seen: dict[int, list[Tensor]] = {}

    @contextmanager
    def watch(self, blocks: Iterable[nn.Module], *, wanted: bool) -> Iterator[None]:
        """Watch these blocks until the end of the context, or do nothing where nothing is wanted."""
        norms: list[Any] = [block.attention_norm for block in blocks] if wanted else []
        hooks = [norm.register_forward_pre_hook(partial(self._see, index)) for index, norm in enumerate(norms)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def and_last(self, last: Tensor) -> tuple[Tensor, ...] | None:
        """What transformers calls `hidden_states`.

        Args:
            last: (batch, length, hidden_size) after the final norm.

        Returns:
            The embedded tokens, what each block but the last gave, and `last`: one more than there are blocks, each of
            the shape of `last`. None where nothing was watched. Tokens of an earlier call that the cache read together
            with these are left out.
        """
        if not self._seen:
            return None
        length = last.shape[1]
        return *(torch.cat(seen, 1)[:, -length:] for seen in self._seen.values()), last

    def _see(self, index: int, norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._seen.setdefault(index, []).append(given[0])
