"""Blocks of tokens: each token sees its own block whole, and all blocks before it; causal attention between blocks.

A block that fits into a chunk is a matter of the mask inside it. A longer one is not: what its later chunks give comes
beside what a causal call gives.
"""

import torch
from torch import Tensor

from polysketch.ops.linear.aligned_op import fold, run
from polysketch.ops.linear.backends import Backend
from polysketch.ops.linear.packing import expanded_size, symmetrize
from polysketch.ops.linear.spans import Cut, lengths_of_spans, run_in_spans
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan
from polysketch.ops.mass import quotient

_MOST_IN_A_CHUNK = 256


def with_chunk(inputs: Inputs, plan: Plan, backend: Backend) -> Plan:
    """The plan with a chunk, where the backend may choose it: whole blocks, or less than one.

    A block longer than a chunk costs the sums after each block in memory. That is at most about twice the values, for
    blocks of fewer tokens than half the numbers that a feature vector stands for are one chunk.
    """
    length, block = inputs.query.shape[2], plan.diagonal
    chunk = plan.chunk or backend.chunk_of(length, plan)
    if block == Diagonal.CAUSAL or inputs.local_key is not None or chunk >= length:
        return plan._replace(chunk=chunk)
    most = max(_MOST_IN_A_CHUNK, expanded_size(inputs.key.shape[3], plan.power, plan.factors) // 2)
    if block <= most:
        chunk = max(1, chunk // block) * block
    return plan._replace(chunk=chunk)


def run_in_blocks(inputs: Inputs, plan: Plan, backend: Backend) -> Outputs:
    """A causal call on aligned inputs, whose blocks may be longer than its chunks."""
    if plan.diagonal == Diagonal.CAUSAL:
        return run_in_spans(inputs, plan, backend)
    length, chunk = inputs.query.shape[2], plan.chunk
    plan = plan._replace(diagonal=min(plan.diagonal, -(-length // chunk) * chunk))
    if plan.diagonal <= chunk:
        whole = plan.diagonal == chunk
        return run_in_spans(inputs, plan._replace(diagonal=Diagonal.FULL) if whole else plan, backend)
    if inputs.local_key is None:
        return _run_apart(inputs, plan, backend)
    return (run_in_spans if backend.long_blocks else _with_later_chunks)(inputs, plan, backend)


def _run_apart(inputs: Inputs, plan: Plan, backend: Backend) -> Outputs:
    """Every block reads the sums through its own end: blocks as rows of the batch, folded, added up, read."""
    length = inputs.key.shape[2]
    cut = Cut(-(-length // plan.diagonal), plan.diagonal, -length % plan.diagonal)
    given = inputs._replace(sums=None, normalizer=None).differentiable()
    blocks = Inputs(**{name: cut.split(tensor) for name, tensor in given.items()})
    real = lengths_of_spans(cut, length, inputs.length, inputs.key)
    own = fold(blocks._replace(length=real), plan, backend)
    before = _symmetric(inputs.sums, inputs.normalizer, inputs.key.shape[3], plan)
    sums, normalizer = (_through(cut, x, initial) for x, initial in zip(own, before, strict=True))
    reading = plan._replace(chunk=plan.diagonal, diagonal=Diagonal.NONE, return_sums=False)
    found = run(blocks._replace(sums=sums, normalizer=normalizer), reading, backend)
    return Outputs(
        cut.join(found.output)[:, :, :length],
        cut.join(found.denominator)[:, :, :length],
        cut.last(sums) if plan.return_sums else found.sums,
        cut.last(normalizer) if plan.return_sums else found.normalizer,
    )


def _symmetric(
    sums: Tensor | None, normalizer: Tensor | None, features: int, plan: Plan
) -> tuple[Tensor | None, Tensor | None]:
    """A state's sums, with the gradient that every backend gives them: the same for what must be the same."""
    if sums is None or normalizer is None or plan.power == 1:
        return sums, normalizer
    return symmetrize(sums, features), symmetrize(normalizer[..., None], features)[..., 0]


def _through(cut: Cut, own: Tensor, initial: Tensor | None) -> Tensor:
    """The sums through the end of each block, from each block's own (batch * count, heads, ...) and earlier ones."""
    own = own.unflatten(0, (-1, cut.count)).cumsum(1)
    return (own if initial is None else own + initial[:, None].to(own.dtype)).flatten(0, 1)


def _with_later_chunks(inputs: Inputs, plan: Plan, backend: Backend) -> Outputs:
    """Local chunks, several to a block: what comes before a chunk, the chunk unmasked, and later chunks of its block.

    For backends that do not take long blocks themselves. They are added up; a chunk subtracted from the sum of all
    would lose the far tokens to rounding.
    """
    length, dtype, block = inputs.query.shape[2], inputs.value.dtype, plan.diagonal
    # Numerators before their division leave the range of float16.
    inputs = inputs._replace(value=inputs.value.float() if dtype == torch.float16 else inputs.value)
    one_way = plan._replace(offset=0.0)  # divided, where that is asked for, so that each way resolves its masses
    before = run_in_spans(inputs, one_way._replace(diagonal=Diagonal.FULL), backend)
    cut = Cut(-(-length // block), block, -length % block)
    turned = Inputs(*(cut.split(x).flip(2) for x in (inputs.query, inputs.key, inputs.value)))
    later = run(turned, one_way._replace(diagonal=Diagonal.NONE, return_sums=False), backend)
    output, mass = (cut.join(x.flip(2))[:, :, :length] for x in (later.output, later.denominator))
    if plan.normalize:
        output, before = output * mass[..., None], before._replace(output=before.output * before.denominator[..., None])
    output, mass = before.output + output, plan.offset + before.denominator + mass
    if plan.normalize:
        output = quotient(output, mass)
    return before._replace(output=output.to(dtype), denominator=mass)


def run_both_directions(inputs: Inputs, plan: Plan, backend: Backend) -> Outputs:
    """Not causal, with exact chunks: one block of everything."""
    length = inputs.query.shape[2]
    chunk = min(plan.chunk, max(16, 1 << (length - 1).bit_length()))  # a short row is one chunk
    everything = plan._replace(causal=True, chunk=chunk, diagonal=-(-length // chunk) * chunk)
    return run_in_blocks(inputs._replace(length=None), everything, backend)
