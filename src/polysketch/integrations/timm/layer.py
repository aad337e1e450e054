"""timm's attention layer with a mechanism in the place of softmax."""

from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor

from polysketch.integrations.key_masks import key_mask_of
from polysketch.integrations.timm.chosen import Chosen
from polysketch.nn import apply_rotation


class MechanismAttention(Attention):
    """`timm.layers.Attention` that attends by a mechanism: the same projections, norms and gate by the same names.

    With the mechanism `softmax` and the same weights it gives what timm's own gives. Weights that a mechanism has are
    the submodule `mechanism`.

    Args:
        *args, **kwargs: as for timm's layer; `attn_drop` must be 0.
        chosen: the mechanism.

    Raises:
        ValueError: attention dropout, which no mechanism has, or sizes that do not fit the mechanism.
    """

    def __init__(self, *args: Any, chosen: Chosen, **kwargs: Any) -> None:
        if kwargs.get("attn_drop"):
            raise ValueError(f"expected attn_drop=0, for mechanisms drop no weights, found {kwargs['attn_drop']}")
        super().__init__(*args, **kwargs)
        self.chosen = chosen
        self.mechanism = self._built().to(device=self.proj.weight.device, dtype=self.proj.weight.dtype)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend.

        Args:
            x: (batch, length, dim).
            attn_mask: (batch or 1, 1, 1, length), padding alone: bool, or numbers added to logits (`key_mask_of`).
            is_causal: as in timm, for a mechanism that can be causal.

        Returns:
            (batch, length, dim of the output).

        Raises:
            ValueError: a mask of pairs, another number of tokens than the grid has, or what the mechanism refuses.
        """
        batch, length, _ = x.shape
        projected = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = projected.unbind(0)
        query, key = (norm(each).to(value.dtype) for norm, each in ((self.q_norm, query), (self.k_norm, key)))
        given: dict[str, Any] = {"unrotated": (query, key)} if self.mechanism.reads_unrotated else {}
        rotation = self.chosen.rotation(query)
        if rotation is not None:
            query, key = apply_rotation(query, rotation), apply_rotation(key, rotation)
        mask = None if attn_mask is None else _padding(attn_mask, batch, length)
        attended = self.mechanism(query, key, value, causal=is_causal, key_mask=mask, hidden=x, **given)
        joined = self.norm(attended.transpose(1, 2).flatten(2))
        gate = getattr(self, "gate", None)
        return self.proj_drop(self.proj(joined if gate is None else joined * gate(x).sigmoid()))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the mechanism's weights anew: timm has drawn those of its linear layers as it draws its own."""
        self.mechanism.load_state_dict(self._built().state_dict())

    def _built(self) -> torch.nn.Module:
        return self.chosen.build(self.num_heads, self.head_dim, self.qkv.in_features)


def attention_layer(
    name: str,
    *,
    grid: tuple[int, int] | None = None,
    class_tokens: int = 1,
    rotary: bool = False,
    **options: Any,
) -> type[MechanismAttention]:
    """A class of attention layers, for the argument `attn_layer` of timm's models.

    Args:
        name: a key of `polysketch.attention.MECHANISMS` that sees both sides.
        grid: (height, width) of every picture in patches; for rotary positions, and for mechanisms that convolve over
            the picture. A layer sees how many patches there are, not their rows: of pictures of several sizes
            (`dynamic_img_size`) it takes all as of this grid.
        class_tokens: tokens before the patches, class token and registers; 0 for a model without.
        rotary: rotate queries and keys by the row and the column of their patch, beside the positions of the model.
        **options: of the mechanism; `polysketch.attention.option_names(name)` lists them.

    Raises:
        ValueError: an unknown mechanism or option, one that is causal only, or no grid where one is needed.
    """
    chosen = Chosen(name, options, grid, class_tokens, rotary)

    class Layer(MechanismAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, chosen=chosen, **kwargs)

    return Layer


def _padding(mask: Tensor, batch: int, length: int) -> Tensor:
    """The mask without its axes of heads and queries, where these say nothing; else as it is, to be refused."""
    return key_mask_of(mask[:, 0, 0] if mask.dim() == 4 and mask.shape[1:3] == (1, 1) else mask[None], batch, length)
