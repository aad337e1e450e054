"""Finding out what rotary positions do to a layer's queries and keys, by a look at one vector at several positions."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.integrations.replacement.layer_inputs import OPTION, layer_inputs, with_hidden
from polysketch.integrations.replacement.locating import attention_layers, decoder_of
from polysketch.integrations.replacement.rotation import turned_back
from polysketch.integrations.replacement.taking_over import taken_over
from polysketch.models.modes import evaluation_mode

_TOKENS = 4


@dataclass
class Look:
    """What becomes of one vector at several positions of a layer.

    Attributes:
        layers: layer index -> whether rotary positions turn its queries and keys; None where something else than the
            rotation that can be undone tells positions. A layer that does not hand on its options is missing.
    """

    layers: dict[int, bool | None] = field(default_factory=dict)

    def before(
        self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook: the layer is given one vector at all positions, and asked for a look instead of attention."""
        inputs = layer_inputs(arguments, keywords)
        row = torch.randn(inputs.hidden.shape[-1], generator=torch.Generator().manual_seed(0)).to(inputs.hidden)
        arguments, keywords = with_hidden(arguments, keywords, row.expand_as(inputs.hidden))
        return arguments, {**keywords, OPTION: inputs._replace(look=self.note)}

    def note(self, index: int, layer: nn.Module, query: Tensor, key: Tensor, positions: Any) -> None:
        """What the layer's attention function is given of that vector."""
        if _alike(query) and _alike(key):
            self.layers[index] = False
            return
        back = turned_back(layer, query, key, positions)
        undone = back is not None and all(map(_is_undone, (query, key), back))
        self.layers[index] = True if undone else None


def _alike(x: Tensor) -> bool:
    """Whether a head's vectors are the same at all positions but for rounding, and not zero.

    Number by number, as single ones may be far larger than those that rotary positions change.
    """
    first, eps = x[:, :, :1], torch.finfo(x.dtype).eps
    tolerance = 8 * eps * first.abs() + 1e-5 * x.abs().max()
    return bool(x.any()) and bool(((x - first).abs() <= tolerance).all())


def _is_undone(rotated: Tensor, back: Tensor) -> bool:
    """Whether of the difference between positions nothing but rounding is left."""
    left, before = ((x - x[:, :, :1]).double().square().sum() for x in (back, rotated))
    return bool(left < max(1e-6, (8 * torch.finfo(rotated.dtype).eps) ** 2) * before)


def look_at_layers(model: Any, layers: Collection[int]) -> dict[int, bool | None]:
    """What rotary positions do to queries and keys in these layers; see `Look.layers`.

    The model, which stays as it is, reads four tokens. Each of these layers is given one random vector at all four in
    place of its input. So all that tells its queries apart is their positions: they are alike where nothing rotates,
    and alike when turned back where that undoes it.

    Args:
        model: of transformers, with its own attention or with replaced one.
        layers: their indices.
    """
    found, look, decoder = attention_layers(model), Look(), decoder_of(model)
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device=decoder.device)
    with taken_over(model), evaluation_mode(decoder), torch.no_grad():
        hooks = [found[index].register_forward_pre_hook(look.before, with_kwargs=True) for index in layers]
        try:
            decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return look.layers
