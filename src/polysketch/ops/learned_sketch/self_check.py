"""A small map by the programs and by the chunked backend."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from polysketch.ops.learned_sketch.networks import Networks
from polysketch.ops.triton import self_check

_ROWS = 70  # no multiple of a block

Sketch = Callable[..., Tensor]


def programs_agree(sketch: Sketch, x: Tensor, weights: Sequence[Tensor], networks: Networks) -> bool:
    """Whether the programs may be taken for maps with these widths; see `ops.triton.self_check`.

    Args:
        sketch: `learned_sketch`, which calls this.
    """
    shapes = [tuple(weight.shape) for weight in weights[: networks.tensors]]
    call = {**networks._asdict(), "input": x.shape[3], "hidden": shapes[2][0], "size": shapes[-1][0]}
    return self_check.passed("learned_sketch", x, call, partial(_errors, sketch, x, shapes, networks))


def _errors(sketch: Sketch, like: Tensor, shapes: list[tuple], networks: Networks, backward: bool) -> dict[str, float]:
    names = {f"weight_{index:03}": shape for index, shape in enumerate(shapes)}
    inputs = self_check.random_inputs(x=(1, 1, _ROWS, like.shape[3]), **names)
    for name in names:  # matrices keep the size of what they multiply; scales are near one, and biases too
        tensor = inputs[name]
        inputs[name] = tensor / tensor.shape[1] ** 0.5 if tensor.dim() == 2 else 1 + 0.1 * tensor

    def run(backend: str, x: Tensor, **weights: Tensor) -> Tensor:
        return sketch(x, list(weights.values()), **networks._asdict(), backend=backend)

    return self_check.disagreements(partial(run, "triton"), partial(run, "chunked"), inputs, like, backward=backward)
