"""Gradients of plain sums of weighted values, for ops that are made of linear attention."""

from torch import Tensor

from polysketch.ops.linear.api import linear_attention_backend
from polysketch.ops.linear.backends import BACKENDS
from polysketch.ops.linear.self_check import programs_agree
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan


def ask_programs_of_gradients(key: Tensor, value: Tensor, *, factors: int) -> None:
    """Let the programs that `linear_attention_gradients` would run be checked: a backward pass itself asks nothing."""
    _picked(key, key, value, factors)


def linear_attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, *, factors: int, sums: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and, if given, the sums before the first token, of causal `linear_attention` of power 1.

    The call is that with `normalize=False`. Nothing of its forward pass is needed.

    Args:
        query, key, value: (batch, heads, length, width), features and values, of one dtype.
        upstream: the gradient of the output.
        factors: as in `linear_attention`.
        sums: of a state.
    """
    inputs, backend = Inputs(query, key, value), BACKENDS[_picked(query, key, value, factors)]
    plan = _plan(factors)
    plan = plan._replace(chunk=backend.chunk_of(query.shape[2], plan))
    if sums is not None:
        inputs = inputs._replace(sums=sums, normalizer=sums.new_zeros(sums.shape[:3]))
    outputs = Outputs.empty(inputs, plan)  # read only where a call divides by its masses
    of_mass = upstream.new_zeros(upstream.shape[:3])
    found = backend.backward(inputs, plan, outputs, outputs._replace(output=upstream.contiguous(), denominator=of_mass))
    return found["query"], found["key"], found.get("sums")


def _plan(factors: int) -> Plan:
    """Of a call that weighs all tokens before by their features, undivided; its chunk is the backend's."""
    return Plan(1, factors, True, 0.0, False, 2, 0, Diagonal.CAUSAL, False)


def _picked(query: Tensor, key: Tensor, value: Tensor, factors: int) -> str:
    """The backend's name."""
    picked = linear_attention_backend(query, key, value)
    broken = picked == "triton" and not programs_agree(Inputs(query, key, value), _plan(factors))
    return "chunked" if picked == "reference" or broken else picked
