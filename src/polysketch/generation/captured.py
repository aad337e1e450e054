"""One step of a model as a graph of the device: launched whole, instead of operation by operation from Python.

A step of one token is some hundred operations of a few microseconds each; launched one by one, a GPU waits for Python
most of the time.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from polysketch.models import ModelState, TransformerLM

__all__ = ["Capture", "CapturedStep", "cuda_graph", "why_no_graph"]

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a step of nothing that works at the same addresses every time; gives what repeats it. The step may have been
run any number of times by then."""

_WARM_UP = 2  # steps: programs are compiled and libraries set up, which a capture forbids


class CapturedStep:
    """A step of one token a row, captured once and replayed for every token.

    Ids, logits and state are at fixed addresses. Capturing runs steps on the state, which is then set back to before
    the first token: read the prompts into it afterwards, in place.

    Args:
        model: whose `why_not_captured` has no reason against it; not trained meanwhile.
        state: from its `init_state`, with nothing in it; this step's own from now on.
        capture: how a step is captured.
    """

    def __init__(self, model: TransformerLM, state: ModelState, capture: Capture | None = None) -> None:
        self._model, self._state = model, state
        self._ids = torch.zeros(len(state.position), 1, dtype=torch.int64, device=model.output_bias.device)
        self._logits: Tensor | None = None
        with torch.cuda.device_of(self._ids):
            self._replay = (cuda_graph if capture is None else capture)(self._step)
        self._captured_at = _addresses(state)
        state.reset_()

    def __call__(self, chosen: Tensor) -> Tensor:
        """Feed one token a row, int64 (batch,); the state moves on.

        Returns:
            (batch, vocab) logits, overwritten by the next call.

        Raises:
            RuntimeError: the state is no longer where it was when the step was captured.
        """
        if self._captured_at != _addresses(self._state):
            raise RuntimeError(
                "expected the state at the addresses of the captured step, found it elsewhere: something that read the "
                "prompt replaced a tensor of it instead of writing into it"
            )
        self._ids.copy_(chosen[:, None])
        after = self._state.position + 1
        self._replay()
        self._state.count_on_host_(after)
        assert self._logits is not None
        return self._logits

    def _step(self) -> None:
        logits, _ = self._model.extend(self._ids, self._state)
        self._logits = logits[:, -1]


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Run a step a few times to warm up, then capture it in a CUDA graph; gives the graph's replay."""
    # Beside the current stream, on the one that is captured: what is set up for a stream is then there.
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # On that stream, for PyTorch's own for captures belongs to the device that was first to need it; and back to the
    # current one, which a capture that fails would not give back.
    current = torch.cuda.current_stream()
    with torch.cuda.stream(current), torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        step()
    return graph.replay


def why_no_graph(model: TransformerLM, state: ModelState) -> str | None:
    """Why a step of the model cannot be captured; None where it can."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"graphs of steps are captured on CUDA devices, and the model is on {device}"
    return model.why_not_captured(state)


def _addresses(state: ModelState) -> list[int]:
    """Where the tensors of the state and of all layers are, positions in host memory aside."""
    return [tensor.data_ptr() for part in (state, *state.layers) for tensor in _tensors(part)]


def _tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a state, and of a state within it, but for positions in host memory."""
    for name, value in vars(part).items():
        if isinstance(value, Tensor) and name != "position":
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _tensors(value)
