"""Polysketch attention with heavy entries: exact also for the last keys in the bucket of the query."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch import ops
from polysketch.attention.base import Mechanism
from polysketch.attention.heavy_state import HeavyState, Tokens
from polysketch.attention.linearized import widened
from polysketch.attention.polysketch_paper import PolysketchPaperAttention
from polysketch.attention.span_state import SpanState
from polysketch.feature_maps.draws import draw_normal_
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast
from polysketch.ops.heavy import chunk_edges, heavy_correction, line_codes

MAX_HASH_BITS = 16
# Of the sketched mass, what is left when every key of it was taken out: rounding.
_ROUNDING = 1e-5


class PolysketchHeavyAttention(PolysketchPaperAttention):
    """o_i = (N_i + sum_{j in C_i} (e_ij - s_ij) v_j) / (1 + D_i + sum_{j in C_i} (e_ij - s_ij)).

    N_i and D_i are the numerator and the sum of weights of `PolysketchPaperAttention`. s_ij is its sketched weight,
    gain included. e_ij = <LN(q_i), LN(k_j)>^degree is the exact weight. C_i are the heavy entries: the last heavy_size
    tokens before i's aligned local chunk whose keys are in the bucket of q_i. Weights are exact inside the chunk and on
    C_i, and sketched elsewhere. A sketch errs most on the largest weights, and a key close to the query is likely in
    its bucket. Without `causal`, C_i also holds the first `heavy_size` such tokens behind the chunk.

    A bucket is a cell of random hyperplanes. It holds lines, not directions: an even power cannot tell q from -q, nor
    does the bucket. So `hash_bits` hyperplanes make 2^(hash_bits - 1) buckets. A key at the angle a to the query
    shares its bucket with probability (1 - a / pi)^bits + (a / pi)^bits. There is no gradient through the choice.

    PolySketchFormer (arXiv:2310.01655) names sketches with HyperAttention's hashing (arXiv:2310.05869) as future work.
    The choice of C_i is this library's; it makes the state of decoding constant in size.

    Args:
        num_heads, head_dim, num_kv_heads, degree, sketch_size, learned, projection, share, prefix_gain: as for
            `PolysketchPaperAttention`. There is no gate: heavy entries would need the decay of every pair.
        sketch_expansion, sketch_depth, sketch_activation: as there.
        redraw_interval: as there; hyperplanes stay as they are.
        local_chunk: tokens of a chunk with exact weights; candidates lie outside it, so it cannot be None.
        heavy_size: candidates of a query; 2 heavy_size without `causal`.
        hash_bits: hyperplanes, 1 to 16. More make buckets more selective, and the state larger.

    Attributes:
        hyperplanes: (head_dim, hash_bits) buffer, the same for all heads, queries and keys; saved with the module.

    Raises:
        TypeError, ValueError: as `PolysketchPaperAttention`, and for `heavy_size` or `hash_bits` out of range.

    What counts as exact: `prefix_share` and `calibrate` take heavy entries as exact mass, as they take the chunk; the
    prefix is what is still sketched. `remove_prefix` leaves the chunk and the heavy entries.

    Cost, beyond that of `PolysketchPaperAttention`: sorting by bucket, and about 2 (head_dim + sketch_size + value_dim
    + 1) (heavy_size + 128) operations a token and head: measured 1.56 times its time forward at 16,384 tokens (4 heads
    of 64, learned sketch of 32, chunks of 1,024, two CPU threads; benchmarks/results/cpu-20261126-mechanisms.json).
    The state has 2^(hash_bits - 1) heavy_size (head_dim + sketch_size + value_dim + 1) more numbers a key/value head:
    1.3 MB of float32 at heads of 64 and the defaults. Values and sums are float32 inside, float64 for float64, whatever
    the inputs.
    """

    hyperplanes: Tensor
    query_norm: nn.LayerNorm
    key_norm: nn.LayerNorm

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
        local_chunk: int = 1024,
        share: Literal["layer", "head"] = "layer",
        prefix_gain: float | tuple[float, ...] | None = None,
        sketch_expansion: int = 8,
        sketch_depth: int = 2,
        sketch_activation: Literal["gelu", "relu", "silu"] = "gelu",
        heavy_size: int = 64,
        hash_bits: int = 6,
        redraw_interval: int | None = None,
    ) -> None:
        _check_options(local_chunk, heavy_size, hash_bits)
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            degree=degree,
            sketch_size=sketch_size,
            learned=learned,
            projection=projection,
            local_chunk=local_chunk,
            share=share,
            prefix_gain=prefix_gain,
            sketch_expansion=sketch_expansion,
            sketch_depth=sketch_depth,
            sketch_activation=sketch_activation,
            redraw_interval=redraw_interval,
        )
        self.heavy_size = heavy_size
        self.register_buffer("hyperplanes", torch.empty(head_dim, hash_bits))
        self.resample()

    @property
    def is_cross(self) -> bool:
        """Buckets are made of chunks of tokens that queries and keys share."""
        return False

    def why_not_blocks(self, block_size: int) -> str | None:
        """As `Mechanism.why_not_blocks`: a block lies within a chunk, before which heavy entries are looked for."""
        if self.local_chunk is None or self.local_chunk % block_size == 0:
            return None
        return f"block_size must divide local_chunk, got {block_size} and {self.local_chunk}"

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw other hyperplanes, from the default generator when none is given."""
        draw_normal_(self.hyperplanes, generator)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`; `hidden` is ignored."""
        query, key, value, _ = self.real_inputs(query, key, value, key_mask)
        wide = _with_ones(value)
        features, options = self._operands(query, key, wide.dtype)
        options |= self.block_options(block_size)
        sums = ops.linear_attention(*features, wide, causal=causal, key_mask=key_mask, **options).output
        codes = self._codes(query, key, options["local"])
        sums = sums + self._correction(features, wide, options["local"], codes, key_mask, causal=causal)
        return self._quotient(sums, value.dtype)

    def why_not_sums_in(self, dtype: torch.dtype) -> str | None:
        """As `Mechanism.why_not_sums_in`."""
        return f"{type(self).__name__} corrects its sums exactly: they stay in float32"

    def init_state(  # type: ignore[override]
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> HeavyState:
        """Nothing seen; the size of the state depends on the options, never on the context.

        Args:
            batch_size, device, dtype: as for `Mechanism.init_state`.
            value_dim: width of the values to come; head_dim when None.
        """
        width = self.head_dim if value_dim is None else value_dim
        attention = super().init_state(batch_size, device, dtype, value_dim=width + 1)
        return HeavyState.init(attention, self._buckets, self.heavy_size)

    @torch.no_grad()
    def extend(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: HeavyState,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, HeavyState]:
        """As `Mechanism.extend`; the cost of a token does not depend on how many came before.

        A single token reads the keys of one bucket. Where chunks fill up, and for several tokens at once, the
        remembered ones are sorted together with the new ones.
        """
        query, key, value, _ = self.new_inputs(query, key, value, key_mask)
        wide = _with_ones(value)
        state.check(wide, self._buckets, self.heavy_size)
        features, options = self._operands(query, key, wide.dtype)
        blocks = self._blocks_after(state, block_size)
        correction = self._corrected_(query, key, wide, features, options["local"], state, key_mask)
        options |= {"key_mask": key_mask, **blocks}
        sums = ops.linear_attention_extend_(*features, wide, state.attention, **options).output
        return self._quotient(sums + correction, value.dtype), state

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """Refused: no gradient passes to the remembered keys of a part of the sequence before."""
        return Mechanism.init_span(self, batch_size, device, dtype, value_dim=value_dim)

    def forward_span(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: SpanState,
        *,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, SpanState]:
        """Refused, as `init_span`."""
        return Mechanism.forward_span(self, query, key, value, state, hidden=hidden)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, heavy_size={self.heavy_size}, hash_bits={self.hyperplanes.shape[1]}"

    @property
    def _buckets(self) -> int:
        return 2 ** (self.hyperplanes.shape[1] - 1)

    def _operands(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Features, and the options of the op for sums instead of means."""
        features, options = self.operands(query, key, dtype, None)
        return features, {**options, "normalize": False}

    def _codes(self, query: Tensor, key: Tensor, local: ops.LocalPolynomial) -> tuple[Tensor, Tensor]:
        """Buckets of queries and keys, of their layer-normed selves in float32 at least.

        Rounded to half precision first, they would change sides, and the longer the context the more.
        """
        return _line_codes(self.query_norm, query, local.query, self.hyperplanes), _line_codes(
            self.key_norm, key, local.key, self.hyperplanes
        )

    def _correction(
        self,
        features: tuple[Tensor, Tensor],
        value: Tensor,
        local: ops.LocalPolynomial,
        codes: tuple[Tensor, Tensor],
        key_mask: Tensor | None,
        *,
        causal: bool,
    ) -> Tensor:
        """What heavy entries add to the sums of a whole sequence."""
        before, after = chunk_edges(value, local.chunk, key_mask)
        return heavy_correction(
            local.query,
            local.key,
            *features,
            value,
            query_codes=codes[0],
            key_codes=_masked(codes[1], key_mask),
            before=before,
            after=None if causal else after,
            degree=self.degree,
            size=self.heavy_size,
        )

    def _corrected_(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        features: tuple[Tensor, Tensor],
        local: ops.LocalPolynomial,
        state: HeavyState,
        key_mask: Tensor | None,
    ) -> Tensor:
        """What heavy entries add to the sums of new tokens; the state remembers these tokens."""
        codes, dtype = self._codes(query, key, local), state.key.dtype
        queries, query_features = local.query.to(dtype), features[0].to(dtype)
        if query.shape[2] == 1 and key_mask is None and state.stays_open(1):
            state.open_(codes[1])
            return state.correction(queries, query_features, codes[0], self.degree)
        new = Tokens(local.key.to(dtype), features[1].to(dtype), value.to(dtype), _masked(codes[1], key_mask))
        tokens, span = state.listed(new), state.span(query.shape[2], key_mask)
        correction = heavy_correction(
            queries,
            tokens.key,
            query_features,
            tokens.features,
            tokens.value,
            query_codes=codes[0],
            key_codes=tokens.codes,
            before=span.before,
            degree=self.degree,
            size=self.heavy_size,
        )
        state.remember_(tokens, span)
        return correction

    def _quotient(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Numerators over masses, which are the offset at least: rounding must not bring them below."""
        return (sums[..., :-1] / (sums[..., -1:] + self.offset).clamp(min=self.offset)).to(dtype)

    def _masses(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None, hidden: Tensor | None, *, with_gain: bool
    ) -> tuple[Tensor, Tensor]:
        """As `PolysketchPaperAttention`, with heavy entries moved from the sketched to the exact mass."""
        prefix, exact = super()._masses(query, key, key_mask, hidden, with_gain=with_gain)
        with without_autocast(query.device.type):
            dtype = next(self.parameters()).dtype
            query, key = query.to(dtype), key.to(dtype)
            features, options = self.operands(query, key, dtype, None, with_gain=with_gain)
            local, ones = options["local"], key.new_ones(*key.shape[:3], 1)
            codes = self._codes(query, key, local)
            silent = (torch.zeros_like(features[0]), features[1])
            heavy = self._correction(silent, ones, local, codes, key_mask, causal=True)
            mute = local._replace(query=torch.zeros_like(local.query))
            replaced = self._correction(features, ones, mute, codes, key_mask, causal=True)
        rest = prefix + replaced[..., 0].float()
        return torch.where(rest > _ROUNDING * prefix, rest, 0.0), exact + heavy[..., 0].float()


def _with_ones(value: Tensor) -> Tensor:
    """In float32 at least, with a last column of ones, whose sums are those of the weights."""
    return F.pad(widened(value), (0, 1), value=1.0)


def _masked(codes: Tensor, key_mask: Tensor | None) -> Tensor:
    return codes if key_mask is None else codes.masked_fill(~key_mask[:, None], -1)


@torch.no_grad()
def _line_codes(norm: nn.LayerNorm, x: Tensor, normed: Tensor, hyperplanes: Tensor) -> Tensor:
    """Buckets of norm(x); `normed` is that, in the precision of its inputs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if torch.finfo(x.dtype).bits < 32 or torch.finfo(norm.weight.dtype).bits < 32:
        with without_autocast(x.device.type):
            normed = F.layer_norm(x.to(wide), norm.normalized_shape, norm.weight.to(wide), norm.bias.to(wide), norm.eps)
    return line_codes(normed, hyperplanes)


def _check_options(local_chunk: int, heavy_size: int, hash_bits: int) -> None:
    if local_chunk is None:
        raise ValueError("polysketch-heavy needs a local_chunk: heavy entries are candidates outside of it, got None")
    check_at_least_one(heavy_size=heavy_size, hash_bits=hash_bits)
    if hash_bits > MAX_HASH_BITS:
        raise ValueError(
            f"hash_bits must be at most {MAX_HASH_BITS}, got {hash_bits}: decoding remembers {heavy_size} tokens for "
            f"each of 2^(hash_bits - 1) buckets"
        )
