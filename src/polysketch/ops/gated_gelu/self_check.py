"""A small gated projection by the programs and by the definition."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from polysketch.ops.triton import self_check

_ROWS = 70  # no multiple of a block, and more than one

Gate = Callable[..., Tensor]


def programs_agree(gate: Gate, joined: Tensor) -> bool:
    """Whether the programs may be taken for projections of this width; see `ops.triton.self_check`.

    Args:
        gate: `gated_gelu`.
        joined: of the call.
    """
    return self_check.passed("gated_gelu", joined, {"width": joined.shape[-1]}, partial(_errors, gate, joined))


def _errors(gate: Gate, like: Tensor, backward: bool) -> dict[str, float]:
    drawn = self_check.random_inputs(joined=(_ROWS, like.shape[-1]))
    programs, definition = (partial(gate, backend=backend) for backend in ("triton", "reference"))
    return self_check.disagreements(programs, definition, drawn, like, backward=backward)
