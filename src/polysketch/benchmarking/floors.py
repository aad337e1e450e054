"""Operations and bytes that a computation cannot do without, counted from shapes; with them, the time it must take.

Backward passes are counted with the recomputation that every memory-saving implementation does, as is usual for
attention: 2.5 times the forward products. Bytes: every input read once and every output written once per pass.
"""

from dataclasses import dataclass

from polysketch.benchmarking.timing import Rates

_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Floor:
    """Floating-point operations and bytes moved, at least."""

    operations: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        """The longer of the two times."""
        return max(self.operations / rates.operations, self.bytes / rates.bandwidth)

    def __add__(self, other: "Floor") -> "Floor":
        return Floor(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, factor: float) -> "Floor":
        """So many of it."""
        return Floor(self.operations * factor, self.bytes * factor)


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention call; heads of 64 as in the papers' models. Not `causal`, tokens see all others."""

    batch: int
    length: int
    heads: int = 12
    head_dim: int = 64
    causal: bool = True

    @property
    def seen(self) -> float:
        """Tokens that a token sees in the mean."""
        return self.length / 2 if self.causal else self.length

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.batch * self.length

    @property
    def rows(self) -> int:
        """Tokens times heads."""
        return self.tokens * self.heads


def exact_attention(shape: Shape, *, backward: bool, itemsize: int) -> Floor:
    """Softmax or polynomial attention: two n x n products a head, half of them when causal."""
    return nearby_attention(shape, shape.seen, backward=backward, itemsize=itemsize)


def nearby_attention(shape: Shape, seen: float, *, backward: bool, itemsize: int) -> Floor:
    """Attention of every token to `seen` others in the mean, at most to all that it may see."""
    products = 2 * 2 * shape.rows * min(seen, shape.seen) * shape.head_dim
    return _floor(products, shape.rows * itemsize, 3 * shape.head_dim, shape.head_dim, backward)


def linear_attention(shape: Shape, sketch_size: int, local: int, *, backward: bool, itemsize: int) -> Floor:
    """Attention over given features, power 2, exact in chunks of `local`."""
    read = 2 * sketch_size + 3 * shape.head_dim
    products = _linear_products(shape, sketch_size, local)
    return _floor(products, shape.rows * itemsize, read, shape.head_dim, backward)


def polysketch(
    shape: Shape, sketch_size: int, local: int, *, backward: bool, itemsize: int, learned: bool = True
) -> Floor:
    """The mechanism from queries, keys and values on: a sketch of degree 4, learned or random, then attention."""
    products = _linear_products(shape, sketch_size, local)
    attention = _floor(products, shape.rows * itemsize, 3 * shape.head_dim, shape.head_dim, backward)
    return attention + Floor(_sketch_products(shape, sketch_size, learned) * (3 if backward else 1), 0)


def cumulative_sums(shape: Shape, features: int, *, itemsize: int) -> Floor:
    """Causal attention of power 1 with nothing exact: every token is folded into one state and reads it."""
    products = 2 * 2 * shape.rows * features * (shape.head_dim + 1)
    return _floor(products, shape.rows * itemsize, 2 * features + shape.head_dim, shape.head_dim, backward=False)


def _floor(products: float, row_bytes: float, read: int, written: int, backward: bool) -> Floor:
    """Forward: read and write. Backward besides: read both again and the gradient of the output, write gradients."""
    if not backward:
        return Floor(products, row_bytes * (read + written))
    return Floor(products * (1 + _ATTENTION_BACKWARD), row_bytes * 3 * (read + written))


def _linear_products(shape: Shape, sketch_size: int, local: int) -> float:
    """Chunks: two local x local products, half of them when causal. One read of the sums and one fold: of every token,
    and when causal of those beyond the first chunk; none where all tokens share a chunk."""
    expanded = sketch_size * (sketch_size + 1) // 2
    chunk = min(local, shape.length)
    without = chunk if shape.causal or chunk == shape.length else 0
    beyond = shape.batch * shape.heads * (shape.length - without)
    near = chunk / 2 if shape.causal else chunk
    return 2 * 2 * shape.rows * near * shape.head_dim + 2 * 2 * beyond * expanded * (shape.head_dim + 1)


def _sketch_products(shape: Shape, sketch_size: int, learned: bool) -> float:
    """Queries and keys through the two networks, or the two random matrices, of degree 4."""
    networks = 16 * shape.head_dim * sketch_size + 48 * sketch_size**2
    return 2 * 2 * shape.rows * (networks if learned else 2 * shape.head_dim * sketch_size)
