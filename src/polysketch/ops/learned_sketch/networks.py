"""What the networks of the learned sketch are, and how their weights come: a flat list.

For every map, for every network (the leaves of the recursion first, then the next level, pairs in order), for every
one of its stages: norm scale, norm bias, up, down. A stage is f(x) = down activation(up LN(x)).
"""

from typing import NamedTuple

from torch import Tensor

from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.learned_sketch.activations import check_activation

TENSORS = 4
"""Of a stage."""
PAPER_DEPTH = 2
PAPER_ACTIVATION = "gelu"


class Networks(NamedTuple):
    """The networks beside their weights.

    Attributes:
        leaves: degree / 2, the number of networks of a map that take x.
        depth: stages of a network, one after another.
        activation: of every stage, a key of `ACTIVATIONS`.
    """

    leaves: int
    depth: int = PAPER_DEPTH
    activation: str = PAPER_ACTIVATION

    @property
    def of_a_map(self) -> int:
        """How many: every level of the recursion has half of the networks of the one before, down to two."""
        return 2 * self.leaves - 2

    @property
    def tensors(self) -> int:
        """Weights of a map."""
        return self.of_a_map * self.depth * TENSORS

    @property
    def levels(self) -> list[int]:
        """Networks of each level of a map, from the leaves up."""
        return [self.leaves >> level for level in range(self.leaves.bit_length() - 1)]

    def check(self, weights: list[Tensor]) -> None:
        """Refuse an activation or depth that does not exist, and weights of other networks.

        Raises:
            TypeError: a depth that is no integer.
            ValueError: a depth below one, an unknown activation, or as many weights as no number of maps has.
        """
        check_at_least_one(depth=self.depth)
        check_activation(self.activation)
        if len(weights) % self.tensors:
            raise ValueError(
                f"expected {self.tensors} weights for every map, of {self.of_a_map} networks of depth {self.depth}, got"
                f" {len(weights)}"
            )
