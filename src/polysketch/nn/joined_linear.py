"""Several linear maps of one input in one matrix."""

from collections.abc import Sequence

from torch import nn


class JoinedLinear(nn.Linear):
    """`nn.Linear` whose outputs are those of several maps, one after the other: one product instead of several.

    It computes what `nn.Linear` does. It says where one matrix ends and the next begins, for who treats matrices as
    such: Muon orthogonalises each by itself.

    Args:
        inputs: width of the input.
        parts: width of each map's output.
        bias: whether outputs have biases.

    Attributes:
        parts: rows of each map in the weight.
    """

    def __init__(self, inputs: int, parts: Sequence[int], *, bias: bool) -> None:
        super().__init__(inputs, sum(parts), bias=bias)
        self.parts = tuple(parts)
