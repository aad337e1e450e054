"""Which tokens of a row each rank holds, decided on the host from sizes alone."""

from dataclasses import dataclass
from itertools import pairwise

from polysketch.ops.arguments import check_at_least_one


@dataclass(frozen=True)
class ContextPlan:
    """A row of tokens in tiles, neighbouring tiles on one rank.

    Tiles are what is computed as one piece. A row of so many tokens in so many tiles is cut at the same places
    whatever the number of ranks, and so gives the same bits.

    Attributes:
        edges: where tiles begin, and where the last one ends; they rise.
        ranks: a divisor of the number of tiles; each holds as many.

    Raises:
        ValueError: edges that do not begin at 0 and rise, or tiles that ranks do not divide.
    """

    edges: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        check_at_least_one(ranks=self.ranks)
        if len(self.edges) < 2 or self.edges[0] != 0 or any(b <= a for a, b in pairwise(self.edges)):
            raise ValueError(f"edges of tiles must begin at 0 and rise, got {self.edges}")
        if self.tiles % self.ranks:
            raise ValueError(
                f"the tiles of a row must be a multiple of the ranks that share it, got {self.tiles} tiles and "
                f"{self.ranks} ranks"
            )

    @classmethod
    def even(cls, length: int, tiles: int, ranks: int) -> "ContextPlan":
        """Tiles as equal as they can be, the longer ones first.

        Raises:
            ValueError: fewer tokens than tiles, or tiles that ranks do not divide.
        """
        check_at_least_one(tiles=tiles)
        if length < tiles:
            raise ValueError(f"a row of {length} tokens cannot be cut into {tiles} tiles: give longer rows")
        size, longer = divmod(length, tiles)
        return cls(tuple(size * tile + min(tile, longer) for tile in range(tiles + 1)), ranks)

    @property
    def tiles(self) -> int:
        """Their number."""
        return len(self.edges) - 1

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.edges[-1]

    def of_rank(self, rank: int) -> list[slice]:
        """The tiles of a rank, in their order."""
        each = self.tiles // self.ranks
        return [slice(*self.edges[tile : tile + 2]) for tile in range(rank * each, (rank + 1) * each)]
