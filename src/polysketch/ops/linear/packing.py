"""The layouts in which a state keeps expanded features: as they are, in tiles of squares, in products of two halves.

At power 2 the expansion is x (x) x, which is symmetric.

x in R^r is padded with zeros to a multiple of 16 and cut into tiles of 16. Of the r^2 products x_a x_b only the tile
pairs I <= J are written, each as 16 x 16 values in row-major order, pairs ordered (0,0), (0,1), ..., (1,1), ...:

    (x . y)^2 = sum over I <= J of w_IJ <x_I (x) x_J, y_I (x) y_J>,    w_II = 1, w_IJ = 2 otherwise

The factor 2 belongs to the query side, so that a state is a plain sum of products of keys.

With two factors x is two halves (a, b), and the expansion a (x) b: the products a_i b_j, i major, each once.
"""

from functools import cache

import torch
from torch import Tensor

TILE = 16


@cache
def tile_pairs(feature_dim: int) -> tuple[tuple[int, int], ...]:
    """Pairs (I, J), I <= J, of tiles of a vector of `feature_dim` entries, in layout order."""
    count = -(-feature_dim // TILE)
    return tuple((i, j) for i in range(count) for j in range(i, count))


def on_diagonal(feature_dim: int, device: torch.device) -> Tensor:
    """(pairs,) bool: whether the tiles of a pair are the same one. Made on the device: nothing waits for a copy."""
    count = -(-feature_dim // TILE)
    pairs = torch.zeros(len(tile_pairs(feature_dim)), dtype=torch.bool, device=device)
    for tile in range(count):
        pairs[tile * count - tile * (tile - 1) // 2] = True
    return pairs


def expanded_size(feature_dim: int, power: int, factors: int) -> int:
    """Length of an expanded feature vector: 256 values a tile pair at power 2; (feature_dim / 2)^2 with two factors."""
    if factors == 2:
        return (feature_dim // 2) ** 2
    if power == 1:
        return feature_dim
    count = (feature_dim + TILE - 1) // TILE
    return count * (count + 1) // 2 * TILE * TILE


def pad_features(x: Tensor) -> Tensor:
    """(..., r) -> (..., r rounded up to a multiple of 16), zeros appended; x itself where nothing is to be added."""
    missing = -x.shape[-1] % TILE
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def expand_tiles(x: Tensor, *, double_off_diagonal: bool) -> Tensor:
    """x (..., r), r a multiple of 16 -> (..., expanded_size): the products of each tile pair.

    `double_off_diagonal` is true on the query side (see the module's formula).
    """
    tiles = x.unflatten(-1, (-1, TILE))
    doubled = tiles + tiles if double_off_diagonal else tiles
    pairs = tile_pairs(x.shape[-1])
    products = [(tiles if i == j else doubled)[..., i, :, None] * tiles[..., j, None, :] for i, j in pairs]
    return torch.stack(products, -3).flatten(-3)


def halves(x: Tensor, factors: int) -> tuple[Tensor, ...]:
    """x itself, or with two factors its halves (..., r / 2), views of it."""
    return (x,) if factors == 1 else x.chunk(2, -1)


def expand_factors(x: Tensor) -> Tensor:
    """x (..., r), the halves a and b -> (..., (r / 2)^2): a_i b_j, i major."""
    first, second = x.chunk(2, -1)
    return (first[..., :, None] * second[..., None, :]).flatten(-2)


def expand(x: Tensor, power: int, factors: int, *, query: bool) -> Tensor:
    """x (..., r) -> (..., expanded_size): what sums are made of, on the query's side with its weights."""
    if factors == 2:
        return expand_factors(x)
    return x if power == 1 else expand_tiles(pad_features(x), double_off_diagonal=query)


def symmetrize(packed: Tensor, feature_dim: int) -> Tensor:
    """(..., expanded_size, h): x_a x_b and x_b x_a of a tile (I, I) replaced by their mean, as every state has them."""
    tiles = packed.unflatten(-2, (-1, TILE, TILE))
    diagonal = on_diagonal(feature_dim, packed.device)
    return torch.where(diagonal[:, None, None, None], (tiles + tiles.transpose(-2, -3)) / 2, tiles).flatten(-4, -2)


def pack_matrix(matrix: Tensor) -> Tensor:
    """(..., r, r) -> (..., expanded_size): the tiles I <= J of a matrix, r a multiple of 16."""
    blocks = matrix.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    return torch.cat([blocks[..., i, :, j, :].flatten(-2) for i, j in tile_pairs(matrix.shape[-1])], dim=-1)


def pack_matrix_backward(gradient: Tensor, feature_dim: int) -> Tensor:
    """The adjoint of `pack_matrix`: (..., expanded_size) -> (..., r, r), r = `feature_dim` padded."""
    padded = feature_dim + -feature_dim % TILE
    matrix = gradient.new_zeros(*gradient.shape[:-1], padded, padded)
    blocks = matrix.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    tiles = gradient.unflatten(-1, (-1, TILE, TILE))
    for index, (i, j) in enumerate(tile_pairs(feature_dim)):
        blocks[..., i, :, j, :] = tiles[..., index, :, :]
    return matrix


def unpack_matrix(packed: Tensor, feature_dim: int) -> Tensor:
    """(..., expanded_size) -> (..., r, r), r = `feature_dim` padded: tile (J, I) is the transpose of tile (I, J)."""
    padded = feature_dim + -feature_dim % TILE
    matrix = packed.new_zeros(*packed.shape[:-1], padded, padded)
    blocks = matrix.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    tiles = packed.unflatten(-1, (-1, TILE, TILE))
    for index, (i, j) in enumerate(tile_pairs(feature_dim)):
        blocks[..., j, :, i, :] = tiles[..., index, :, :].mT
        blocks[..., i, :, j, :] = tiles[..., index, :, :]
    return matrix


def unpack_matrix_backward(gradient: Tensor) -> Tensor:
    """The adjoint of `unpack_matrix`: (..., r, r) -> (..., expanded_size)."""
    both = pack_matrix(gradient) + pack_matrix(gradient.mT)
    diagonal = on_diagonal(gradient.shape[-1], gradient.device)
    return torch.where(diagonal.repeat_interleave(TILE * TILE), pack_matrix(gradient), both)
