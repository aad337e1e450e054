"""HyperAttention: softmax attention in nearly linear time, by hashing and by sampling."""

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.kept_tokens import AllTokensAttention
from polysketch.feature_maps.draws import draw_normal_
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.hyper import check_capping, check_hyperplanes, check_options


class HyperAttention(AllTokensAttention):
    """o_i = sum_j softmax_j(scale q_i . k_j) v_j: near keys exactly, the others from samples (arXiv:2310.05869).

    Keys are sorted by their hashes (sortLSH). Those in a query's chunk of `chunk_size` are near it. Each of
    `sample_size` sampled keys stands for many of the others. Causal attention is exact inside blocks of `min_length`
    tokens. It reaches earlier tokens by spans of 1, 2, 4, ... blocks. Time is n log n, memory n. `ops.hyper_attention`
    says what is exact, and where this departs from the paper.

    Decoding keeps every key and value and attends to them exactly. So `forward` agrees with `extend` up to `min_length`
    tokens, and approximates it beyond. The mechanism has no parameters and approximates softmax attention whatever the
    queries and keys are: it can be patched into trained models.

    Cost: 2 (chunk_size + sample_size) (head_dim + value_dim) operations a token and head, half of that for every
    doubling of `min_length` when causal, and exact attention to min_length / 2 tokens on average then.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        chunk_size: keys attended exactly; 256 in the paper.
        sample_size: keys sampled for each key head, in causal attention for each span; 256 in the paper.
        min_length: up to how many tokens attention is exact; 4096 in the paper.
        hash_bits: hyperplanes, 1 to 62; 7 in the authors' code.
        sampling: how keys are drawn for weighted values: "uniform", with the draw that sums of weights have, as in
            the paper's experiments, or "norm", with a draw of their own by the norms of the values (algorithm 3,
            Lemma 2).
        scale: factor on q . k; 1 / sqrt(head_dim) when None.
        seed: of the samples; they depend on it, on the head and on positions only.
        capping: a pair (epsilon, kappa), between whose bounds algorithm 2 holds the denominator; None for no bounds, as
            in the paper's experiments. A list will do, so that options can come from JSON.

    Attributes:
        hyperplanes: (head_dim, hash_bits) buffer, the same for all heads, queries and keys; saved with the module.
    """

    estimates_forward = True
    hyperplanes: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        chunk_size: int = 256,
        sample_size: int = 256,
        min_length: int = 4096,
        hash_bits: int = 7,
        sampling: str = "uniform",
        scale: float | None = None,
        seed: int = 0,
        capping: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_options(chunk_size, sample_size, min_length, sampling, seed)
        check_at_least_one(hash_bits=hash_bits)
        self.chunk_size = chunk_size
        self.sample_size = sample_size
        self.min_length = min_length
        self.sampling = sampling
        self.scale = scale
        self.seed = seed
        self.capping = check_capping(capping)
        self.register_buffer("hyperplanes", torch.empty(head_dim, hash_bits))
        check_hyperplanes(self.hyperplanes, head_dim)
        self.resample()

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw other hyperplanes, from the default generator when none is given."""
        draw_normal_(self.hyperplanes, generator)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, key_mask: Tensor | None) -> Tensor:
        """The estimate, over a whole sequence."""
        return ops.hyper_attention(
            query,
            key,
            value,
            hyperplanes=self.hyperplanes,
            causal=causal,
            key_mask=key_mask,
            scale=self.scale,
            chunk_size=self.chunk_size,
            sample_size=self.sample_size,
            min_length=self.min_length,
            sampling=self.sampling,
            seed=self.seed,
            capping=self.capping,
        )

    def attend_to_cache(self, query: Tensor, keys: Tensor, values: Tensor, *, key_mask: Tensor | None) -> Tensor:
        """Softmax attention from the last tokens, exactly."""
        return ops.softmax_attention_with_cache(query, keys, values, key_mask=key_mask, scale=self.scale)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"{super().extra_repr()}, chunk_size={self.chunk_size}, sample_size={self.sample_size}, "
            f"min_length={self.min_length}, hash_bits={self.hyperplanes.shape[1]}, sampling={self.sampling}, "
            f"scale={self.scale}, seed={self.seed}, capping={None if self.capping is None else tuple(self.capping)}"
        )
