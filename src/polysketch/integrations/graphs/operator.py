"""Sums over features by ONNX's own operator LinearAttention, of opset 27."""

from __future__ import annotations

import torch
from torch import Tensor

from polysketch.attention.traced_sums import Recurrence

OPSET = 27
"""The first with the operator."""


class OnnxRecurrence(Recurrence):
    """Nodes LinearAttention in place of `Recurrence`: rule "linear", with decays "gated", "delta" to correct.

    They exist in a graph of ONNX alone: called outside of an export, it gives zeros.
    """

    def add(
        self, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, log_decay: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Recurrence.add`."""
        if log_decay is None:
            return _node("linear", query, key, value, sums)
        return _node("gated", query, key, value, sums, log_decay.transpose(1, 2))

    def correct(
        self, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, strength: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Recurrence.correct`."""
        return _node("delta", query, key, value, sums, None, strength.transpose(1, 2))


def _node(rule: str, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, *given: Tensor | None) -> tuple:
    """Output and state of one node; `given` are its inputs decay and beta."""
    heads = {"q_num_heads": query.shape[1], "kv_num_heads": key.shape[1]}
    output, after = torch.onnx.ops.symbolic_multi_out(
        "LinearAttention",
        (*(_joined(x) for x in (query, key, value)), sums, *given),
        {**heads, "update_rule": rule, "scale": 1.0},
        dtypes=(sums.dtype, sums.dtype),
        shapes=((query.shape[0], query.shape[2], query.shape[1] * value.shape[3]), sums.shape),
    )
    return output.unflatten(-1, (query.shape[1], -1)).transpose(1, 2), after


def _joined(x: Tensor) -> Tensor:
    """(batch, heads, length, width) -> (batch, length, heads * width)."""
    return x.transpose(1, 2).flatten(2)
