"""A small sketch by the programs and by the definition."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from polysketch.ops.triton import self_check

_ROWS = 70  # no multiple of a block

Sketch = Callable[..., Tensor]


def programs_agree(sketch: Sketch, x: Tensor, factors: Tensor) -> bool:
    """Whether the programs may be taken for factors with these sizes; see `ops.triton.self_check`.

    Args:
        sketch: `low_rank_sketch`, which calls this.
    """
    _, *shape = factors.shape
    call = dict(zip(("rank", "degree", "inputs", "features"), shape, strict=True))
    return self_check.passed("low_rank_sketch", x, call, partial(_errors, sketch, x, shape))


def _errors(sketch: Sketch, like: Tensor, shape: list[int], backward: bool) -> dict[str, float]:
    width = shape[2]
    inputs = self_check.random_inputs(x=(1, 1, _ROWS, width), factors=(1, *shape))
    inputs["factors"] /= width**0.5  # a map keeps the size of what it maps
    programs, definition = (partial(sketch, backend=backend) for backend in ("triton", "reference"))
    return self_check.disagreements(programs, definition, inputs, like, backward=backward)
