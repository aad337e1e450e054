"""The triton backend: the chunked algorithm as programs for CUDA devices (`programs`).

Forward, two passes: the sums before every chunk, kept in memory in the dtype of the products; then every block of
queries on its own reads them and adds what its chunk holds. Backward: the sums again, and in reverse their gradients;
then queries, keys and what is inside the chunks, each block on its own. Nothing is kept between the two but the output
and a denominator for each row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.packing import TILE, expanded_size, on_diagonal, symmetrize
from polysketch.ops.linear.triton.launches import FoldedSums, Launches, SumsPair
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan
from polysketch.ops.triton import availability

WIDEST_VALUE = 128
"""Gradients are made of whole rows of values, in registers."""

SCRATCH_BYTES = 2**30
"""Of the sums before every chunk, kept at once; more heads than fit take turns."""


def why_not(query: Tensor, value: Tensor | None = None) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    if value is not None and value.shape[-1] > WIDEST_VALUE:
        return f"the triton backend takes values up to {WIDEST_VALUE} wide, got {value.shape[-1]}"
    return availability.why_not(query)


def forward(inputs: Inputs, plan: Plan) -> Outputs:
    """The op on aligned inputs; see `polysketch.ops.linear_attention` for the formula."""
    outputs = Outputs.empty(inputs, plan)
    for part in _parts(inputs, plan):
        _forward(Launches(part.inputs(inputs), plan), Outputs(*(part.of(tensor) for tensor in outputs)))
    return outputs


def backward(inputs: Inputs, plan: Plan, outputs: Outputs, upstream: Outputs) -> dict[str, Tensor]:
    """Gradients by the names of `Inputs`; see `Backend`.

    Args:
        inputs, plan: of the forward call.
        outputs: what it gave.
        upstream: the gradients of its outputs, contiguous.
    """
    given = inputs._replace(log_decay=None).differentiable()
    # The gradient of the decay adds up products with these over the whole sequence: no rounding before.
    exact = ("query", "key") if inputs.log_decay is not None else ()
    gradients = {
        name: tensor.new_empty(tensor.shape, dtype=torch.float32 if name in exact else tensor.dtype)
        for name, tensor in given.items()
    }
    for part in _parts(inputs, plan):
        _backward(
            Launches(part.inputs(inputs), plan),
            Outputs(*(part.of(tensor) for tensor in outputs)),
            Outputs(*(part.of(tensor) for tensor in upstream)),
            {name: part.of(tensor) for name, tensor in gradients.items()},
        )
    return gradients


class _Part(NamedTuple):
    """Rows of the batch, and of their key heads, that are worked on together; one of the two is everything."""

    rows: slice
    first: int
    last: int
    key_heads: int

    def of(self, tensor: Tensor) -> Tensor:
        """This part of (batch, heads, ...), a contiguous one of a contiguous tensor."""
        shared = tensor.shape[1] // self.key_heads
        return tensor[self.rows, self.first * shared : self.last * shared]

    def inputs(self, inputs: Inputs) -> Inputs:
        """This part of every input."""
        length = None if inputs.length is None else inputs.length[self.rows]
        return inputs._replace(
            **{name: self.of(tensor) for name, tensor in inputs.differentiable().items()}, length=length
        )


def _parts(inputs: Inputs, plan: Plan) -> Iterator[_Part]:
    """As few parts as keep the scratch memory within its limit, at least a key head each."""
    batch, heads, length = inputs.key.shape[:3]
    chunks = -(-length // plan.chunk) if plan.causal else 1
    # Sums in the dtype of the products, normalizers in float32.
    row = inputs.value.shape[3] * (2 if inputs.value.dtype == torch.bfloat16 else 4) + 4
    of_head = chunks * expanded_size(inputs.key.shape[3], plan.power, plan.factors) * row
    fitting = max(1, SCRATCH_BYTES // of_head)
    if fitting >= heads:
        rows = fitting // heads
        yield from (_Part(slice(row, min(row + rows, batch)), 0, heads, heads) for row in range(0, batch, rows))
        return
    for row in range(batch):
        for head in range(0, heads, fitting):
            yield _Part(slice(row, row + 1), head, min(head + fitting, heads), heads)


def _forward(call: Launches, outputs: Outputs) -> None:
    plan = call.plan
    sums = call.fold_keys(states=plan.causal, final=plan.return_sums or not plan.causal)
    if call.queries:
        call.outputs(sums if plan.causal else _as_state(call, sums, weighted=False), outputs)
    if plan.return_sums:
        sums.copy_final_to(outputs.sums, outputs.normalizer)


def _backward(call: Launches, outputs: Outputs, upstream: Outputs, gradients: dict[str, Tensor]) -> None:
    plan = call.plan
    numerator, mass = call.upstream(outputs, upstream)
    if call.queries:
        _query_gradients(call, numerator, mass, gradients)
    wanted = call.inputs.sums is not None
    last = _upstream_sums(call, upstream)
    found = call.fold_queries(numerator, mass, last, states=plan.causal, final=wanted or not plan.causal)
    states = found if plan.causal else _as_state(call, found, weighted=True)
    call.key_gradient(states, gradients["key"], gradients["value"])
    if plan.causal and plan.diagonal != Diagonal.NONE:
        call.inner_gradients(numerator, mass, gradients)
    if wanted:
        found.copy_final_to(gradients["sums"], gradients["normalizer"])
        if not plan.causal and call.folding[1] is not None:
            gradients["sums"].mul_(call.folding[1][..., None])
            gradients["normalizer"].mul_(call.folding[1])


def _query_gradients(call: Launches, numerator: Tensor, mass: Tensor, gradients: dict[str, Tensor]) -> None:
    """In a function of its own, so that the sums before every chunk are gone before their gradients come."""
    causal = call.plan.causal
    sums = call.fold_keys(states=causal, final=not causal)
    states = sums if causal else _as_state(call, sums, weighted=False)
    call.query_gradient(states, numerator, mass, gradients["query"])


def _upstream_sums(call: Launches, upstream: Outputs) -> SumsPair:
    """The gradient of the final sums, symmetric like every state."""
    if not call.plan.return_sums:
        return None, None
    if call.plan.power == 1:
        return upstream.sums, upstream.normalizer
    normalizer = symmetrize(upstream.normalizer[..., None], call.features)[..., 0]
    return symmetrize(upstream.sums, call.features), normalizer


def _as_state(call: Launches, sums: FoldedSums, *, weighted: bool) -> FoldedSums:
    """Sums after the last chunk as those that all tokens read: one chunk for them all, weighted as they are read."""
    assert sums.final is not None
    assert sums.final_normalizer is not None
    final, normalizer = sums.final, sums.final_normalizer
    if call.plan.power == 2 and not weighted:
        weights = 2.0 - on_diagonal(call.features, final.device).float().repeat_interleave(TILE * TILE)
        final, normalizer = final * weights[:, None], normalizer * weights
    return sums._replace(states=final.to(call.dot)[:, :, None], state_normalizers=normalizer[:, :, None])
