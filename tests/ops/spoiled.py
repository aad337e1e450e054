"""Backends of linear attention that are wrong on purpose."""

from collections.abc import Callable

from polysketch.ops.linear.aligned import attend
from polysketch.ops.linear.backends import BACKENDS, Backend
from polysketch.ops.linear.types import Inputs, LinearAttentionResult, Plan

INTACT = BACKENDS["chunked"]


def with_other_result(
    change: Callable[[LinearAttentionResult, Inputs], LinearAttentionResult], name: str = "wrong"
) -> Backend:
    """The chunked backend, with its result changed."""
    return Backend(name, whole=lambda inputs, *rest: change(attend(INTACT, inputs, *rest), inputs))


def with_other_call(change: Callable[[Inputs, Plan], tuple[Inputs, Plan]], name: str = "wrong") -> Backend:
    """The chunked backend, asked for something else."""
    return Backend(name, whole=lambda inputs, plan, *rest: attend(INTACT, *change(inputs, plan), *rest))


def scaled(factor: float) -> Backend:
    """The chunked backend, with its output multiplied."""
    return with_other_result(lambda result, _: result._replace(output=result.output * factor))
