"""Looking on while a replaced model computes: what conversion, calibration and measurements build on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from polysketch.integrations.replacement.bookkeeping import record_of
from polysketch.integrations.replacement.call import AttentionCall
from polysketch.integrations.replacement.locating import attention_layers
from polysketch.integrations.replacement.taking_over import taken_over


@contextmanager
def observing_attention(model: Any, function: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """Within it, every replaced layer calls `function` in place of its mechanism.

    Layers call it in order, in each forward pass without a cache of states. `call.original()` is the layer's own
    softmax attention, `call.replacement()` the mechanism's; both are differentiable.

    Args:
        model: after `replace_attention`.
        function: is given an `AttentionCall`; what it returns, (batch, num_heads, length, head_dim), is the layer's
            output.

    Raises:
        ValueError: nothing was replaced in the model.
    """
    record = record_of(attention_layers(model)[0])
    if record is None:
        raise ValueError("no attention was replaced in this model: call replace_attention first")
    before = record.model.observer
    record.model.observer = function
    try:
        yield
    finally:
        record.model.observer = before


@contextmanager
def around_attention(model: Any, context: Callable[[int], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within it, every layer's attention function, replaced or the model's own, runs in `context(layer)`: to time it.

    What is inside is attention alone, from queries, keys and values to its output, without projections.

    Args:
        model: of transformers, with replaced attention or without.
        context: layer index -> a context manager.
    """
    with taken_over(model) as record:
        before, record.around = record.around, context
        try:
            yield
        finally:
            record.around = before
