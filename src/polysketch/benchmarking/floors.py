"""Operations and bytes that a computation cannot do without, counted from shapes; with them, the time it must take.

Backward passes are counted with the recomputation that every memory-saving implementation does, as is usual for
attention: 2.5 times the forward products. Bytes: every input read once and every output written once per pass.
"""

from dataclasses import dataclass

from polysketch.benchmarking.timing import Rates

_ATTENTION_BACKWARD = 2.5
_WITH_BACKWARD = 3  # times the products of a map: the gradient of what goes in, and of its weights or the map anew


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
    products = _sums_products(shape, squares(sketch_size), local, shape.head_dim + 1)
    return _floor(products, shape.rows * itemsize, read, shape.head_dim, backward)


def polysketch(
    shape: Shape,
    sketch_size: int,
    local: int,
    *,
    backward: bool,
    itemsize: int,
    learned: bool = True,
    expansion: int = 8,
    depth: int = 2,
) -> Floor:
    """The mechanism from queries, keys and values on: a sketch of degree 4, learned or random, then attention.

    The two networks of a learned sketch of r features are expansion (2 head_dim r + (4 depth - 2) r^2) multiply-adds a
    query or key, the two matrices of a random one 2 head_dim r.
    """
    random = 2 * shape.head_dim * sketch_size
    mapped = expansion * (random + (4 * depth - 2) * sketch_size**2) if learned else random
    return linearised(shape, squares(sketch_size), mapped=mapped, local=local, backward=backward, itemsize=itemsize)


def linearised(
    shape: Shape,
    products: int,
    *,
    mapped: int,
    local: int = 0,
    normalized: bool = True,
    backward: bool,
    itemsize: int,
) -> Floor:
    """A mechanism over features, from queries, keys and values on: maps, then sums.

    Every query reads the sums, and every key is folded into them: products (head_dim + 1) multiply-adds each, the one
    for the denominator. Chunks that causal sums are computed by take more, and are not counted: they could be of one
    token. Nor are all pairs of queries and keys, which are fewer products in short sequences.

    Args:
        products: numbers of a head's sums for each column of the values: features, or products of them.
        mapped: multiply-adds of the features of a query, and as many of a key.
        local: tokens of a chunk with exact weights; 0 for none.
        normalized: whether there is a denominator.
    """
    of_sums = _sums_products(shape, products, local, shape.head_dim + normalized)
    attention = _floor(of_sums, shape.rows * itemsize, 3 * shape.head_dim, shape.head_dim, backward)
    return attention + _maps(shape, mapped, backward=backward)


def heavy_entries(
    shape: Shape, *, sketch_size: int, local: int, heavy_size: int, hash_bits: int, backward: bool
) -> Floor:
    """What `polysketch-heavy` does beside its sums: it hashes, and weighs keys of a bucket twice.

    A candidate is two scores, of head_dim and of sketch_size numbers, and a value with a one beside. Of candidates
    there are as many as are outside of a query's chunk and on one side of it, over the buckets, at most heavy_size: so
    many would be there if all buckets were of one size.
    """
    buckets = 2 ** (hash_bits - 1)
    met = sum(
        (min(local, shape.length - start))
        * sum(
            min(heavy_size, outside / buckets)
            for outside in (start, 0 if shape.causal else max(0, shape.length - start - local))
        )
        for start in range(0, shape.length, local)
    )
    weighed = 2 * shape.batch * shape.heads * met * (2 * shape.head_dim + sketch_size + 1)
    hashed = 2 * 2 * shape.rows * shape.head_dim * hash_bits
    return Floor(weighed * (1 + _ATTENTION_BACKWARD * backward) + hashed, 0)


def hyper_attention(
    shape: Shape,
    *,
    chunk_size: int,
    sample_size: int,
    min_length: int,
    hash_bits: int,
    backward: bool,
    itemsize: int,
) -> Floor:
    """HyperAttention with uniform draws: 4 head_dim operations for each query and key that meet, and the hashes.

    A query meets a chunk and samples, and no more keys than there are. In a causal call it meets the keys of its own
    block of min_length tokens, and of pairs of spans of 1, 2, 4, ... blocks every token of the second meets a chunk and
    samples of the first. Up to min_length tokens all is exact, and nothing is hashed.
    """
    seen = _met_in_all(shape, chunk_size + sample_size, min_length) / shape.length
    hashed = 2 * 2 * shape.rows * shape.head_dim * hash_bits if shape.length > min_length else 0
    return nearby_attention(shape, seen, backward=backward, itemsize=itemsize) + Floor(hashed, 0)


def _met_in_all(shape: Shape, met: int, block: int) -> float:
    """Keys that the queries of a head meet in all, in blocks half of them as in exact attention."""
    length = shape.length
    if length <= block:
        return length * shape.seen
    if not shape.causal:
        return length * min(length, met)
    whole, rest = divmod(length, block)
    pairs, half = (whole * block**2 + rest**2) / 2, block
    while half < length:
        spans, rest = divmod(length, 2 * half)
        pairs += (spans * half + max(0, rest - half)) * min(half, met)
        half *= 2
    return pairs


def delta_beside_window(
    shape: Shape, *, sketch_size: int, window: int, width: int, backward: bool, itemsize: int
) -> Floor:
    """`polysketch`: softmax in a window, and sums of r^2 products written by the delta rule.

    For every token beyond the window the sums are asked for a key, written, and asked for a query: r^2 (head_dim + 1)
    multiply-adds each, and seven times that backward, where they are made again in reverse. In short sequences the
    tokens themselves are asked, which takes fewer (`ops.delta_attention`). The two sketches of a query or key are 2 r
    numbers of `width`. Logits by the layer's input are left out: they are below a hundredth.
    """
    beyond, columns, features = max(0, shape.length - window), shape.head_dim + 1, 2 * sketch_size
    products = min(3 * sketch_size**2 * columns, beyond * (features + columns))
    if backward:
        products += min(7 * sketch_size**2 * columns, beyond * (5 * features + 3 * columns))
    sums = Floor(2 * shape.batch * shape.heads * beyond * products, 0)
    near = nearby_attention(shape, window, backward=backward, itemsize=itemsize)
    return near + sums + _maps(shape, 2 * width * sketch_size, backward=backward)


def squares(features: int) -> int:
    """Products of two of so many features, each once: of power 2."""
    return features * (features + 1) // 2


def cumulative_sums(shape: Shape, features: int, *, itemsize: int) -> Floor:
    """Causal attention of power 1 with nothing exact: every token is folded into one state and reads it."""
    products = 2 * 2 * shape.rows * features * (shape.head_dim + 1)
    return _floor(products, shape.rows * itemsize, 2 * features + shape.head_dim, shape.head_dim, backward=False)


def _floor(products: float, row_bytes: float, read: int, written: int, backward: bool) -> Floor:
    """Forward: read and write. Backward besides: read both again and the gradient of the output, write gradients."""
    if not backward:
        return Floor(products, row_bytes * (read + written))
    return Floor(products * (1 + _ATTENTION_BACKWARD), row_bytes * 3 * (read + written))


def _sums_products(shape: Shape, products: int, local: int, columns: int) -> float:
    """Chunks: two local x local products, half of them when causal. One read of the sums and one fold: of every token,
    and when causal of those beyond the first chunk; none where all tokens share a chunk."""
    chunk = min(local, shape.length)
    without = chunk if shape.causal or chunk == shape.length else 0
    beyond = shape.batch * shape.heads * (shape.length - without)
    near = chunk / 2 if shape.causal else chunk
    return 2 * 2 * shape.rows * near * shape.head_dim + 2 * 2 * beyond * products * columns


def _maps(shape: Shape, mapped: int, *, backward: bool) -> Floor:
    """So many multiply-adds for the features of each query, and of each key."""
    return Floor(2 * 2 * shape.rows * mapped * (_WITH_BACKWARD if backward else 1), 0)
