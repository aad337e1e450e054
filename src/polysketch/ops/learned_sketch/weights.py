"""How the weights of the learned sketch come: a flat list.

For every map, for every network (the leaves of the recursion first, then the next level, pairs in order): norm scale,
norm bias, up, down, norm scale, norm bias, up, down.
"""

TENSORS = 8
"""Of a network."""


def networks_of_a_map(leaves: int) -> int:
    """Every level of the recursion has half of the networks of the one before, down to two."""
    return 2 * leaves - 2
