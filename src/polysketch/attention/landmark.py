"""Mechanisms through landmarks, bidirectional only: Nystromformer's and Skyformer's."""

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import Mechanism
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.landmark import SAMPLE_RANGE


class LandmarkAttention(Mechanism):
    """What both share: landmarks are made of all tokens, so that every output depends on every token.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        num_landmarks: tokens, or means of tokens, that stand for all.
    """

    is_causal = False

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None, num_landmarks: int) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(num_landmarks=num_landmarks)
        self.num_landmarks = num_landmarks

    @property
    def is_cross(self) -> bool:
        """Landmarks are taken from queries and keys of the same tokens."""
        return False

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
        """As `Mechanism.forward`, with `causal=False` alone; `hidden` is ignored.

        Raises:
            ValueError: `causal` is not False.
        """
        self.check_inputs(query, key, value)
        self.block_options(block_size)
        if causal:
            raise ValueError(
                f"{type(self).__name__} cannot be causal, for its landmarks are made of all tokens: pass causal=False"
                " in an encoder, and use another mechanism in a language model"
            )
        return self._attend(query, key, value, key_mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, num_landmarks={self.num_landmarks}"


class NystromAttention(LandmarkAttention):
    """softmax(Q Kl^T) pinv(softmax(Ql Kl^T)) softmax(Ql K^T) V, landmarks being means of segments (Nystromformer).

    Xiong et al., arXiv:2102.03902, section 3. Exact, as near as six iterations come to an inverse, where there are as
    many landmarks as tokens. Linear in the length; bidirectional only, without a state. See `ops.nystrom_attention` for
    departures from the authors' code.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        num_landmarks: segments whose means are the landmarks; 32 to 64 in the paper.

    Cost: 4 num_landmarks (head_dim + value_dim) operations a token and head, and 48 num_landmarks^3 a head for the
    inverse.
    """

    def __init__(
        self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, num_landmarks: int = 64
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads, num_landmarks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        return ops.nystrom_attention(query, key, value, num_landmarks=self.num_landmarks, key_mask=key_mask)


class SkyformerAttention(LandmarkAttention):
    """kap(Q, S) (kap(S, S) + 0.1 I)^(-1) kap(S, K) V with kap(x, y) = exp(-|x - y|^2 / 2) (Skyformer, section 4).

    Chen et al., arXiv:2111.00035. No denominator. Linear in the length; bidirectional only, without a state. The
    landmarks S are queries and keys drawn once, by fractions of a row's real tokens that are saved with the module; the
    authors draw anew in every forward: call `resample` for that. See `ops.skyformer_attention` for other departures
    from their code.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        num_landmarks: half of them queries, half keys; 128 in the paper.

    Cost: 4 num_landmarks (head_dim + value_dim) operations a token and head, and 48 num_landmarks^3 a head for the
    inverse.
    """

    samples: Tensor

    def __init__(
        self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, num_landmarks: int = 128
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads, num_landmarks)
        self.register_buffer("samples", torch.empty(num_landmarks, dtype=torch.int64))
        self.resample()

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw other landmarks, from the global generator when none is given; the same on every device."""
        drawn = torch.randint(SAMPLE_RANGE, (self.num_landmarks,), generator=generator)
        self.samples.copy_(drawn)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        return ops.skyformer_attention(query, key, value, samples=self.samples, key_mask=key_mask)
