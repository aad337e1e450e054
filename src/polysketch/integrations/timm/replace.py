"""Another attention for a vision transformer of timm that is there already."""

from collections.abc import Sequence
from typing import Any

from timm.layers import Attention
from torch import nn

from polysketch.integrations.timm.chosen import Chosen
from polysketch.integrations.timm.layer import MechanismAttention


def replace_attention(
    model: Any, name: str, *, layers: Sequence[int] | None = None, rotary: bool = False, **options: Any
) -> Any:
    """Put a mechanism in the place of softmax in a vision transformer of timm, in some layers or in all.

    Projections, norms and gates stay the model's own, with their weights and names. The mechanism is told the grid of
    the patches and how many tokens stand before them, as they are at the call: after the model's `set_input_size`,
    replace again. Weights that it has are new. A layer that was replaced before is replaced again.

    Args:
        model: a model of timm whose layers are `timm.layers.Attention`, such as `VisionTransformer`; changed in place.
        name: a key of `polysketch.attention.MECHANISMS` that sees both sides.
        layers: indices in the order of the model, of which negative ones count from the end; all when None.
        rotary: rotate queries and keys by the row and the column of their patch, beside the positions of the model.
        **options: of the mechanism.

    Returns:
        `model`.

    Raises:
        TypeError: an option of another type.
        ValueError: a model without such layers or without one grid of patches, a layer that is not there, attention
            dropout, an unknown mechanism or option, a mechanism that is causal only, or one that needs the grid in a
            model of pictures of any size (`dynamic_img_size`).
    """
    found = [path for path, module in model.named_modules() if type(module) is Attention or _is_ours(module)]
    if not found or not hasattr(model, "patch_embed"):
        raise ValueError(
            f"expected a model of timm with layers of timm.layers.Attention, such as VisionTransformer, found "
            f"{type(model).__name__}"
        )
    chosen = Chosen(name, options, _grid(model), model.num_prefix_tokens, rotary)
    if chosen.needs_grid and getattr(model, "dynamic_img_size", False):
        raise ValueError(
            f"expected a model of pictures of one size where {name!r} with rotary={rotary} needs their grid, found"
            " dynamic_img_size=True: make the model with dynamic_img_size=False and img_size=(height, width)"
        )
    built = {path: _replaced(model.get_submodule(path), chosen) for path in _chosen_paths(found, layers)}
    for path, layer in built.items():
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return model


def _grid(model: Any) -> tuple[int, int]:
    """(height, width) in patches, the same in all layers; models of several stages or branches, as PiT, have none."""
    grid = getattr(model.patch_embed, "grid_size", None)
    if grid is None or not hasattr(model, "num_prefix_tokens"):
        raise ValueError(
            "expected a model of timm with one grid of patches in all layers (patch_embed.grid_size and"
            f" num_prefix_tokens), such as VisionTransformer, found {type(model).__name__}"
        )
    height, width = grid
    return height, width


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, MechanismAttention)


def _chosen_paths(found: list[str], layers: Sequence[int] | None) -> list[str]:
    outside = [layer for layer in layers or () if not -len(found) <= layer < len(found)]
    if outside:
        raise ValueError(f"expected layers from 0 to {len(found) - 1}, found {outside[0]}")
    return found if layers is None else [found[layer] for layer in layers]


def _replaced(own: Any, chosen: Chosen) -> MechanismAttention:
    """A layer with the parts of another one."""
    weight = own.proj.weight
    layer = MechanismAttention(
        own.qkv.in_features,
        num_heads=own.num_heads,
        attn_head_dim=own.head_dim,
        dim_out=own.proj.out_features,
        attn_drop=own.attn_drop.p,
        chosen=chosen,
        device=weight.device,
        dtype=weight.dtype,
    )
    for name, part in own.named_children():
        if name != "mechanism":
            setattr(layer, name, part)
    return layer.train(own.training)
