"""The language model with a short convolution in front, as models made for recall have, and no absolute positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.models import ModelConfig, TransformerLM
from polysketch.nn import Rotation, rotation_at

WIDTH = 3


class ShortConvolutionLM(TransformerLM):
    """`TransformerLM` whose embedded tokens pass a causal depthwise convolution instead of gaining sinusoids.

    The plain model would first have to learn that a value follows its key. Before its embedding was scaled, with
    softmax and a vocabulary of 16, it was still guessing among the values it had seen after 700 steps; this one, with a
    vocabulary of 32, recalls after 100. What is left to learn is looking up, which is what the mechanisms are compared
    by. Rotary positions stay. For whole sequences only: decoding would need the convolution's own state.

    Args:
        config: as for `TransformerLM`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.taps = nn.Parameter(torch.randn(WIDTH, config.hidden_size) * WIDTH**-0.5)

    def _embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        self._check_ids(ids)
        embedded = short_convolution(self.embedding(ids), self.taps)
        return embedded, rotation_at(positions, self.config.head_dim, self.config.rope_base)


def short_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """y_i = sum_j taps_j * x_(i - width + 1 + j), channel by channel.

    Args:
        x: (batch, length, channels).
        taps: (width, channels), the last one for the present token.

    Returns:
        (batch, length, channels); position i depends on positions up to i.
    """
    length, width = x.shape[1], len(taps)
    padded = F.pad(x, (0, 0, width - 1, 0))
    return torch.stack([taps[j] * padded[:, j : j + length] for j in range(width)]).sum(0)
