"""Which mechanism stands in the layers of a vision transformer, and what it is told of the picture."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polysketch import attention
from polysketch.attention import Mechanism
from polysketch.nn import Rotation, rotation_on_grid


@dataclass(frozen=True)
class Chosen:
    """A mechanism by name, and its place.

    Attributes:
        name: of a mechanism that sees both sides.
        options: of the mechanism.
        grid: (height, width) of the picture in patches; None where nobody needs it.
        class_tokens: tokens before the patches.
        rotary: rotate queries and keys by the row and the column of their patch.

    Raises:
        ValueError: an unknown mechanism or option, one that is causal only, or no grid where one is needed.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, int] | None = None
    class_tokens: int = 1
    rotary: bool = False

    def __post_init__(self) -> None:
        attention.check_options(self.name, self.options)
        if not attention.mechanism_class(self.name).is_bidirectional:
            both = ", ".join(attention.mechanisms_that("is_bidirectional"))
            raise ValueError(
                f"{self.name!r} is causal only, and a patch sees the whole picture; expected one of {both}"
            )
        if self.grid is None and self.needs_grid:
            what = "rotary=True" if self.rotary else f"{self.name!r}, which convolves over the picture,"
            raise ValueError(f"{what} needs grid=(height, width) in patches, found none")

    def build(self, num_heads: int, head_dim: int, hidden_size: int) -> Mechanism:
        """The mechanism for a layer of these sizes.

        Raises:
            TypeError, ValueError: as `polysketch.attention.build`.
        """
        given: dict[str, Any] = {"grid": self.grid, "class_tokens": self.class_tokens} if self._convolves else {}
        if "hidden_size" in attention.option_names(self.name):
            given["hidden_size"] = hidden_size
        return attention.build(self.name, num_heads=num_heads, head_dim=head_dim, **{**given, **self.options})

    def rotation(self, query: Tensor) -> Rotation | None:
        """That of the patches of a picture.

        Args:
            query: (batch, heads, length, head_dim).

        Raises:
            ValueError: another number of tokens than there are class tokens and patches.
        """
        if not self.rotary or self.grid is None:
            return None
        height, width = self.grid
        if query.shape[2] != self.class_tokens + height * width:
            raise ValueError(
                f"expected {self.class_tokens} class tokens and {height} x {width} patches, found {query.shape[2]} "
                "tokens: give the grid of these pictures"
            )
        return rotation_on_grid(self.grid, query.shape[3], class_tokens=self.class_tokens, device=query.device)

    @property
    def needs_grid(self) -> bool:
        """Whether what it computes depends on the rows and columns of the patches."""
        return self.rotary or self._convolves

    @property
    def _convolves(self) -> bool:
        return "grid" in attention.option_names(self.name)
