"""How a model reads a text that it is measured on: in spans, with its state carried along, or at once."""

from collections.abc import Iterator

from torch import Tensor, nn

from polysketch.attention import Mechanism
from polysketch.models import TransformerLM


def hidden_in_spans(model: TransformerLM, ids: Tensor, span: int) -> Iterator[Tensor]:
    """Hidden states (batch, up to span tokens, hidden_size) of (batch, length) ids, from the first span to the last.

    What the model has learned with is measured: where `estimates_forward`, a text is read at once, and memory grows
    with it.
    """
    span = min(span, ids.shape[1])  # of any size, also one that no tensor could have
    read = _read_at_once if estimates_forward(model) else _read_with_state
    return read(model, ids, span)


def estimates_forward(model: nn.Module) -> bool:
    """Whether reading a text at once gives other outputs than reading it part by part (`Mechanism`)."""
    return any(isinstance(part, Mechanism) and part.estimates_forward for part in model.modules())


def _read_at_once(model: TransformerLM, ids: Tensor, span: int) -> Iterator[Tensor]:
    yield from model.hidden_states(ids).split(span, dim=1)


def _read_with_state(model: TransformerLM, ids: Tensor, span: int) -> Iterator[Tensor]:
    state = model.init_state(len(ids), device=ids.device)
    for part in ids.split(span, dim=1):
        hidden, state = model.extend_hidden(part, state)
        yield hidden
