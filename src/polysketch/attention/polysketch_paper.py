"""Polysketch attention (PolySketchFormer, sections 2.2 to 3.2): sketched beyond the local chunk, exact inside it."""

from typing import Any, Literal

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import check_even_degree, head_norm
from polysketch.attention.decay_gate import DecayGate
from polysketch.attention.linearized import LinearizedAttention
from polysketch.attention.normed_heads import normed_heads
from polysketch.attention.prefix_gain import PrefixGain, mean_share
from polysketch.attention.redrawn import check_interval, first_seed
from polysketch.feature_maps import GaussianSketch, LearnedSketch, RandomSketch, SRHTSketch
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast

_PAPER_NETWORKS = {"expansion": 8, "depth": 2, "activation": "gelu"}
PROJECTIONS: dict[str, type[RandomSketch]] = {"gaussian": GaussianSketch, "srht": SRHTSketch}


class PolysketchPaperAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), in time linear in the length and with a state of constant size.

    PolySketchFormer, sections 2.2 to 3.2. w_ij = <LN(q_i), LN(k_j)>^degree where i and j share an aligned chunk of
    `local_chunk` tokens, and (phi(q_i) . phi(k_j))^2 elsewhere. The random sketch takes the layer-normed queries and
    keys. The learned sketch takes them as they are, for it begins with a norm of its own.

    Departures. There are two layer norms, one for queries and one for keys, where the paper's formula has one rescaling
    for both. In this library's models the norms come after the rotary positions, so that a weight depends on both
    positions, not on their distance alone. `prefix_gain` and `decay_gate` are this library's.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`. Heads of 64 or wider: the contrast of a degree-4 weight
            is about head_dim^2 / 3.
        degree: a power of two; 2 is exact and has nothing to learn.
        sketch_size: r, the number of features; time grows as r^2.
        learned: the learned sketch (Algorithm 2), else the random one (Algorithm 1).
        projection: what the random sketch multiplies with: "gaussian" matrices, or "srht", signs and sampled columns of
            a Hadamard transform; needs learned=False.
        local_chunk: tokens of a chunk with exact weights; None for sketched weights everywhere.
        share: "layer", one sketch for all heads, or "head", one for each key/value head.
        prefix_gain: None is the paper; else the share of the attention mass, or one share per key/value head, that
            `calibrate` gives the sketched weights through a learnable gain. It makes a model learn recall from
            far away sooner, and short-range text worse (docs/results-tried.md).
        decay_gate: decay the sketched weights by a gate on the layer's input (`DecayGate`); needs `hidden_size`. With a
            local part it brings gains spread over the heads.
        hidden_size: width of the layer's input, for the gate.
        sketch_expansion: e, hidden units of the learned sketch's networks for each feature; 8 in the paper.
        sketch_depth: stages of such a network, each a norm, a matrix to hidden units, the activation, a matrix back; 2
            in the paper.
        sketch_activation: "gelu" (the tanh form) as in the paper, "relu" or "silu".
        redraw_interval: training steps between draws of the random sketch; None keeps the first. Needs learned=False.
            What decodes from a state of before a draw would mix features: start a new state.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, or options that do not go together.

    Cost, a token and head, r = sketch_size: 2 r (r + 1) (value_dim + 1) operations for the sums, (head_dim + value_dim)
    local_chunk for the exact part, and at degree 4 the sketch of a query or key, e (2 head_dim r + (4 sketch_depth - 2)
    r^2) multiply-adds where learned and 2 head_dim r where Gaussian. The state is about r^2 / 2 (value_dim + 1) numbers
    a key/value head, and local_chunk (r + head_dim + value_dim) of the open chunk.
    """

    offset = 1.0

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        degree: int = 4,
        sketch_size: int = 32,
        learned: bool = True,
        projection: Literal["gaussian", "srht"] = "gaussian",
        local_chunk: int | None = 1024,
        share: Literal["layer", "head"] = "layer",
        prefix_gain: float | tuple[float, ...] | None = None,
        decay_gate: bool = False,
        hidden_size: int | None = None,
        sketch_expansion: int = 8,
        sketch_depth: int = 2,
        sketch_activation: Literal["gelu", "relu", "silu"] = "gelu",
        redraw_interval: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        networks: dict[str, Any] = {
            "expansion": sketch_expansion,
            "depth": sketch_depth,
            "activation": sketch_activation,
        }
        _check_sketch(learned, networks, redraw_interval)
        _check_options(degree, learned, projection, local_chunk, prefix_gain, decay_gate, hidden_size)
        self.degree, self.local_chunk, self.learned = degree, local_chunk, learned
        self.redraw_interval = redraw_interval
        sizes: dict[str, Any] = {"degree": degree, "sketch_size": sketch_size, "share": share}
        sizes["num_kv_heads"] = self.num_kv_heads
        if learned:
            self.feature_map = LearnedSketch(head_dim, **sizes, **networks)
        else:
            self.feature_map = PROJECTIONS[projection](head_dim, **sizes, seed=first_seed(redraw_interval))
        needs_norm = local_chunk is not None or not learned
        self.query_norm = head_norm(head_dim) if needs_norm else None
        self.key_norm = head_norm(head_dim) if needs_norm else None
        needs_gain = local_chunk is not None and (decay_gate or prefix_gain is not None)
        self.prefix_gain = PrefixGain(self.num_kv_heads, prefix_gain, gated=decay_gate) if needs_gain else None
        self.decay_gate = DecayGate(hidden_size, self.num_kv_heads) if decay_gate and hidden_size is not None else None
        self.is_bidirectional = self.is_blockwise = not decay_gate
        self.prefix_removed = False
        self._options: dict[str, Any] = {
            "degree": degree,
            "sketch_size": sketch_size,
            "learned": learned,
            "projection": projection,
        }
        self._options |= {"local_chunk": local_chunk, "share": share, "prefix_gain": prefix_gain}
        self._options |= {"decay_gate": decay_gate, **{f"sketch_{name}": value for name, value in networks.items()}}
        self._options |= {"redraw_interval": redraw_interval}

    def why_not_blocks(self, block_size: int) -> str | None:
        """As `Mechanism.why_not_blocks`: not with a gate, and blocks and local chunks must not cut one another."""
        if self.decay_gate is not None:
            return "a decay over the tokens before has no other direction: decay_gate=True cannot see by blocks"
        return super().why_not_blocks(block_size)

    @property
    def has_prefix(self) -> bool:
        """Whether there is a local part, so that the sketched rest is a prefix."""
        return self.local_chunk is not None

    @property
    def reads_hidden(self) -> bool:
        """Whether there is a gate."""
        return self.decay_gate is not None

    @property
    def is_calibrated(self) -> bool:
        """Whether there is a gain."""
        return self.prefix_gain is not None

    @torch.no_grad()
    def calibrate(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> None:
        """Set the gain so that the prefix holds the share of the mass that `prefix_gain` asks for.

        The share is the mean over tokens beyond the first chunk. Without `prefix_gain`, or in a sequence of one
        chunk, where there is no prefix, nothing changes.

        Args:
            query, key, key_mask, hidden: as for `forward`, of a batch like those to train on.
        """
        if self.prefix_gain is not None:
            query, key, _, hidden = self.real_inputs(query, key, key, key_mask, hidden)
            self.prefix_gain.calibrate(*self._masses(query, key, key_mask, hidden, with_gain=False))

    @torch.no_grad()
    def prefix_share(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """The mean share of the attention mass that sketched weights hold, over tokens beyond the first chunk.

        Args:
            query, key, key_mask, hidden: as for `forward`.

        Returns:
            (num_heads,) in [0, 1]; 0 in a sequence of one chunk.

        Raises:
            ValueError: without a local part all weights are sketched.
        """
        query, key, _, hidden = self.real_inputs(query, key, key, key_mask, hidden)
        return mean_share(*self._masses(query, key, key_mask, hidden, with_gain=True))

    def remove_prefix(self) -> None:
        """Give sketched weights no mass from now on, so that only the local chunk is attended to: an ablation.

        Raises:
            ValueError: there is no local part, so nothing would be left.
        """
        self._expect_local("remove_prefix")
        self.prefix_removed = True

    def extra_repr(self) -> str:
        """Sizes and options."""
        removed = ", prefix removed" if self.prefix_removed else ""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{super().extra_repr()}, {options}{removed}"

    def operands(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, hidden: Tensor | None, *, with_gain: bool = True
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Query and key features, and the op's options, in one dtype: autocast gives norms another.

        Raises:
            ValueError: a gate without `hidden`.
        """
        normed, features = (query, key), None
        if self.query_norm is not None and self.key_norm is not None:
            sketch = self.feature_map if isinstance(self.feature_map, RandomSketch) else None
            normed, features = normed_heads((self.query_norm, self.key_norm), normed, dtype, sketch)
        if features is None:
            features = self.feature_map.map_both(*((query, key) if self.learned else normed))
        query_features, key_features = self._weighed(*features, with_gain)
        options = {
            "power": self.feature_map.power,
            "offset": self.offset,
            "local": ops.LocalPolynomial(*normed, self.degree, self.local_chunk) if self.local_chunk else None,
            "log_decay": self.decay_gate(hidden) if self.decay_gate is not None else None,
        }
        return (query_features.to(dtype), key_features.to(dtype)), options

    def _weighed(self, query_features: Tensor, key_features: Tensor, with_gain: bool) -> tuple[Tensor, Tensor]:
        """Features with the gain, and none of queries where the prefix is removed."""
        if self.prefix_gain is not None and with_gain:
            query_features, key_features = self.prefix_gain(query_features, key_features)
        return torch.zeros_like(query_features) if self.prefix_removed else query_features, key_features

    def _masses(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, hidden: Tensor | None, *, with_gain: bool
    ) -> tuple[Tensor, Tensor]:
        """Sums of the sketched and of the exact weights of every token: (batch, num_heads, length) each, float32."""
        self._expect_local("the share of the prefix")
        with without_autocast(query.device.type):
            dtype = next(self.parameters()).dtype
            features, options = self.operands(query.to(dtype), key.to(dtype), dtype, hidden, with_gain=with_gain)
        local = options["local"]
        silent = local._replace(query=torch.zeros_like(local.query))
        prefix = self._mass(*features, key_mask, {**options, "local": silent})
        return prefix, self._mass(torch.zeros_like(features[0]), features[1], key_mask, options)

    def _mass(
        self, query_features: Tensor, key_features: Tensor, key_mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """The op's numerator for a value of one: (batch, num_heads, length)."""
        ones = key_features.new_ones(*key_features.shape[:3], 1)
        options = {**options, "causal": True, "normalize": False, "key_mask": key_mask}
        return ops.linear_attention(query_features, key_features, ones, **options).output[..., 0].float()

    def _expect_local(self, what: str) -> None:
        if self.local_chunk is None:
            raise ValueError(f"{what} needs a local part: with local_chunk=None every weight is sketched")


def _check_sketch(learned: bool, networks: dict[str, Any], redraw_interval: int | None) -> None:
    """Refuse networks of what is not learned, and draws of what is not drawn."""
    check_at_least_one(sketch_expansion=networks["expansion"], sketch_depth=networks["depth"])
    for name, value in networks.items():
        if value != _PAPER_NETWORKS[name] and not learned:
            raise ValueError(f"sketch_{name}={value!r} is for the learned sketch: it needs learned=True")
    check_interval(redraw_interval, is_random=not learned, needs="learned=False")


def _check_options(
    degree: int,
    learned: bool,
    projection: str,
    local_chunk: int | None,
    prefix_gain: Any,
    decay_gate: bool,
    hidden_size: int | None,
) -> None:
    """Refuse options out of range or that do not go together; sketch sizes are checked by the feature map."""
    check_even_degree(degree)
    for name, value in (("learned", learned), ("decay_gate", decay_gate)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if projection not in PROJECTIONS:
        raise ValueError(f"unknown projection {projection!r}; known projections: {', '.join(PROJECTIONS)}")
    if learned and projection != "gaussian":
        raise ValueError(f"projection={projection!r} is for the random sketch: it needs learned=False")
    if local_chunk is not None:
        check_at_least_one(local_chunk=local_chunk)
    elif prefix_gain is not None:
        raise ValueError("prefix_gain needs a local part to share the mass with, got local_chunk=None")
    if decay_gate and hidden_size is None:
        raise ValueError("decay_gate=True needs hidden_size, the width of the layer's input")
