"""The learned polynomial sketch (PolySketchFormer, Algorithm 2 and appendix D)."""

from typing import cast

import torch
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap, check_sketch_degree
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.learned_sketch import learned_sketch

_FEW_ROWS = 256
_NORM_EPSILON = 1e-5  # also in ops.learned_sketch


class SketchNetwork(nn.Module):
    """f: LN -> Linear(e r) -> tanh-GELU -> Linear(r) -> LN -> Linear(e r) -> tanh-GELU -> Linear(r); no linear biases.

    It holds the parameters; `ops.learned_sketch` computes with them.

    Args:
        inputs: width of the input.
        sketch_size: r.
        expansion: e, hidden units for each feature.
    """

    def __init__(self, inputs: int, sketch_size: int, expansion: int = 8) -> None:
        super().__init__()
        hidden = expansion * sketch_size
        self.input_norm = nn.LayerNorm(inputs, eps=_NORM_EPSILON)
        self.input_up = nn.Linear(inputs, hidden, bias=False)
        self.input_down = nn.Linear(hidden, sketch_size, bias=False)
        self.middle_norm = nn.LayerNorm(sketch_size, eps=_NORM_EPSILON)
        self.middle_up = nn.Linear(sketch_size, hidden, bias=False)
        self.middle_down = nn.Linear(hidden, sketch_size, bias=False)
        for linear in (self.input_up, self.input_down, self.middle_up, self.middle_down):
            lecun_normal_(linear.weight, linear.in_features)

    def weights(self) -> list[Tensor]:
        """Its eight parameters, in the order `learned_sketch` takes them."""
        norms, ups = (self.input_norm, self.middle_norm), (self.input_up, self.middle_up)
        downs = (self.input_down, self.middle_down)
        return [
            weight
            for norm, up, down in zip(norms, ups, downs, strict=True)
            for weight in (norm.weight, norm.bias, up.weight, down.weight)
        ]


class LearnedSketch(FeatureMap):
    """The recursion of the random sketch with a small network in place of every Gaussian matrix.

        L(A, 1) = A,    L(A, p) = sqrt(r) tanh(sqrt(1/r) f1(L(A, p/2)) * f2(L'(A, p/2))),    phi(x) = L(x, degree / 2)

    with f as in `SketchNetwork`, `degree - 2` networks in all. |phi_i| <= sqrt(r), so a weight is at most r^4. It
    takes queries and keys before any layer norm, for each network begins with its own. Hidden activations, 8 r wide
    as the paper has them, are made for some rows at a time and recomputed in backward.

    Args:
        head_dim: width of one head.
        degree: 4, 8, 16, ...
        sketch_size: r, the number of features.
        num_kv_heads: key and value heads.
        share: "layer", as in the paper, or "head", networks for every key/value head.
        expansion: e, hidden units of a network for each feature; 8 in the paper. Time and parameters are in proportion.

    Raises:
        ValueError: a degree that is no power of two from 4 on (at 2 there is nothing to learn), or a size below one.

    Cost: at degree 4, e (2 head_dim r + 6 r^2) multiply-adds a token and head, as many parameters, and norms.
    """

    power = 2

    def __init__(
        self,
        head_dim: int,
        *,
        degree: int = 4,
        sketch_size: int = 32,
        num_kv_heads: int = 1,
        share: str = "layer",
        expansion: int = 8,
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share=share)
        check_sketch_degree(degree, smallest=4)
        check_at_least_one(sketch_size=sketch_size, expansion=expansion)
        self.degree = degree
        self.feature_dim = sketch_size
        leaves = degree // 2
        inputs = [head_dim] * leaves + [sketch_size] * (leaves - 2)
        self.networks = nn.ModuleList(SketchNetwork(width, sketch_size, expansion) for width in inputs * self.num_maps)

    def map_both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one call where they are few, as in decoding: then calls cost more than they compute."""
        if self.num_maps > 1 or query.shape[:1] + query.shape[2:] != key.shape[:1] + key.shape[2:]:
            return super().map_both(query, key)
        if torch.compiler.is_exporting() or query[..., 0].numel() > _FEW_ROWS:
            return super().map_both(query, key)
        features = self.map(torch.cat([query, key], 1))
        return features[:, : query.shape[1]], features[:, query.shape[1] :]

    def map(self, x: Tensor) -> Tensor:
        """phi of queries or of keys, which share it; computed in the autocast dtype under autocast."""
        self.check_input(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        weights = [weight for network in self.networks for weight in cast(SketchNetwork, network).weights()]
        # Graphs that leave this library have PyTorch's operators alone.
        backend = "reference" if torch.compiler.is_exporting() else "auto"
        return learned_sketch(x.to(dtype), weights, self.degree // 2, backend=backend)
