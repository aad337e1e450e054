"""The learned polynomial sketch (PolySketchFormer, Algorithm 2 and appendix D)."""

from typing import cast

import torch
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap, check_sketch_degree
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.learned_sketch import PAPER_ACTIVATION, PAPER_DEPTH, check_activation, learned_sketches

_FEW_ROWS = 256
_NORM_EPSILON = 1e-5  # also in ops.learned_sketch


class SketchNetwork(nn.Module):
    """f: LN -> Linear(e r) -> activation -> Linear(r), `depth` such stages in turn, without biases in the linears.

    It holds the parameters; `ops.learned_sketch` computes with them, and knows the activation.

    Args:
        inputs: width of the input.
        sketch_size: r.
        expansion: e, hidden units for each feature.
        depth: number of stages; in the paper 2, which makes hidden layers of e r, r and e r.
    """

    def __init__(self, inputs: int, sketch_size: int, expansion: int = 8, depth: int = PAPER_DEPTH) -> None:
        super().__init__()
        hidden = expansion * sketch_size
        names = ["input", "middle", *(f"middle_{index}" for index in range(2, depth))][:depth]
        self._stages = [(f"{name}_norm", f"{name}_up", f"{name}_down") for name in names]
        for (norm, up, down), width in zip(self._stages, [inputs, *[sketch_size] * (depth - 1)], strict=True):
            setattr(self, norm, nn.LayerNorm(width, eps=_NORM_EPSILON))
            setattr(self, up, nn.Linear(width, hidden, bias=False))
            setattr(self, down, nn.Linear(hidden, sketch_size, bias=False))
        for _, up, down in self._stages:
            for linear in (getattr(self, up), getattr(self, down)):
                lecun_normal_(linear.weight, linear.in_features)

    def weights(self) -> list[Tensor]:
        """Its parameters, four of each stage, in the order `learned_sketch` takes them."""
        found: list[Tensor] = []
        for norm_name, up, down in self._stages:
            norm = getattr(self, norm_name)
            found += (norm.weight, norm.bias, getattr(self, up).weight, getattr(self, down).weight)
        return found


class LearnedSketch(FeatureMap):
    """The recursion of the random sketch with a small network in place of every Gaussian matrix.

        L(A, 1) = A,    L(A, p) = sqrt(r) tanh(sqrt(1/r) f1(L(A, p/2)) * f2(L'(A, p/2))),    phi(x) = L(x, degree / 2)

    with f as in `SketchNetwork`, `degree - 2` networks in all. |phi_i| <= sqrt(r), so a weight is at most r^4. It
    takes queries and keys before any layer norm, for each network begins with its own. Hidden activations, 8 r wide
    as the paper has them, are made for some rows at a time and recomputed in backward. The paper expects that better
    networks exist: `expansion`, `depth` and `activation` are for those who look for them.

    Args:
        head_dim: width of one head.
        degree: 4, 8, 16, ...
        sketch_size: r, the number of features.
        num_kv_heads: key and value heads.
        share: "layer", as in the paper, or "head", networks for every key/value head.
        expansion: e, hidden units of a network for each feature; 8 in the paper. Time and parameters are in proportion.
        depth: stages of a network, each LN -> Linear(e r) -> activation -> Linear(r); 2 in the paper.
        activation: "gelu" (the tanh form) as in the paper, "relu" or "silu".

    Raises:
        ValueError: a degree that is no power of two from 4 on (at 2 there is nothing to learn), a size below one, or an
            unknown activation.

    Cost: at degree 4, e (2 head_dim r + (4 depth - 2) r^2) multiply-adds a token and head, as many parameters, and
    norms.
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
        depth: int = PAPER_DEPTH,
        activation: str = PAPER_ACTIVATION,
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share=share)
        check_sketch_degree(degree, smallest=4)
        check_at_least_one(sketch_size=sketch_size, expansion=expansion, depth=depth)
        check_activation(activation)
        self.degree, self.depth, self.activation = degree, depth, activation
        self.feature_dim = sketch_size
        leaves = degree // 2
        inputs = [head_dim] * leaves + [sketch_size] * (leaves - 2)
        self.networks = nn.ModuleList(
            SketchNetwork(width, sketch_size, expansion, depth) for width in inputs * self.num_maps
        )

    def map_both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one call of the networks; as one tensor where they are few, as in decoding."""
        if query.dtype != key.dtype:
            return super().map_both(query, key)
        if torch.compiler.is_exporting() or not self._are_few(query, key):
            query_features, key_features = self._map_each(query, key)
            return query_features, key_features
        features = self.map(torch.cat([query, key], 1))
        return features[:, : query.shape[1]], features[:, query.shape[1] :]

    def _are_few(self, query: Tensor, key: Tensor) -> bool:
        """Whether calls cost more than they compute, and queries and keys stand beside one another as heads do."""
        beside = query.shape[:1] + query.shape[2:] == key.shape[:1] + key.shape[2:]
        return self.num_maps == 1 and beside and query[..., 0].numel() <= _FEW_ROWS

    def map(self, x: Tensor) -> Tensor:
        """phi of queries or of keys, which share it; computed in the autocast dtype under autocast."""
        return self._map_each(x)[0]

    def _map_each(self, *inputs: Tensor) -> list[Tensor]:
        device = inputs[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for x in inputs:
            self.check_input(x)
        weights = [weight for network in self.networks for weight in cast(SketchNetwork, network).weights()]
        # Graphs that leave this library have PyTorch's operators alone.
        backend = "reference" if torch.compiler.is_exporting() else "auto"
        return learned_sketches(
            [x.to(autocast or x.dtype) for x in inputs],
            weights,
            self.degree // 2,
            depth=self.depth,
            activation=self.activation,
            backend=backend,
        )
