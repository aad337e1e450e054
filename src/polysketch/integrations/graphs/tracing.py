"""The two graphs of a model, as `torch.export` traces them."""

from __future__ import annotations

import warnings

import torch
from torch.export import Dim, ExportedProgram, export

from polysketch.attention.traced_sums import Recurrence
from polysketch.integrations.graphs.model import SpanModel
from polysketch.models import TransformerLM

LONGEST_SPAN = 4096
"""Tokens that one call of the prefill graph takes at most."""

_EXAMPLE = 7


@torch.no_grad()
def trace(model: TransformerLM, recurrence: Recurrence | None = None) -> tuple[SpanModel, dict[str, ExportedProgram]]:
    """The graphs `prefill`, of 1 to 4,096 new tokens, and `step`, of one.

    Both are (ids, state) -> (logits of the next token, state), as `SpanModel.forward`; float32, for one row.

    Args:
        model: a language model whose layers all have a state of constant size.
        recurrence: what computes sums over features; plain PyTorch when None.

    Returns:
        The model that was traced, which names the parts of the state, and the graphs by name.

    Raises:
        ValueError: a layer whose state grows, by its number and name.
    """
    spans = SpanModel(model, recurrence).eval()
    state = tuple(part.first for part in spans.parts)
    still: tuple[dict, ...] = tuple({} for _ in state)
    lengths = {"prefill": (_EXAMPLE, {1: Dim("length", min=1, max=LONGEST_SPAN)}), "step": (1, {})}
    programs = {}
    for name, (length, dynamic) in lengths.items():
        ids = torch.zeros(1, length, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch's own, about its own
            programs[name] = export(spans, (ids, *state), dynamic_shapes=(dynamic, still))
    return spans, programs
