"""Gated short convolutions: the layers of BASED that look a few tokens back."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch import ops
from polysketch.attention import SpanState, advance_positions
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.nn.joined_linear import JoinedLinear
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.rope import Rotation
from polysketch.ops import PackedDocuments
from polysketch.ops.arguments import check_at_least_one


@dataclass
class ShortConvolutionState:
    """The last inputs of a short convolution: filter_size - 1 of them, however long the context.

    Attributes:
        tail: (batch, 1, filter_size - 1, expansion * hidden_size).
        position: (batch,) int64 in host memory, tokens seen since each row's first real one.
    """

    tail: Tensor
    position: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tail and the positions."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.tail, self.position))

    def reset_(self) -> None:
        """Back to before the first token, at the same addresses."""
        self.tail.zero_()
        self.position.zero_()

    def clone(self) -> "ShortConvolutionState":
        """An independent copy, to roll back to."""
        return ShortConvolutionState(self.tail.clone(), self.position.clone())

    def reorder(self, indices: Tensor) -> "ShortConvolutionState":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        rows = self.tail.index_select(0, indices.to(self.tail.device))
        return ShortConvolutionState(rows, self.position.index_select(0, indices.cpu()))


class ShortConvolution(TokenMixer):
    """y = (silu(h * (x W1 + b1)) . (x W2 + b2)) W3 + b3, h * a causal convolution of each channel, . entrywise.

    The gated convolution of BASED (Arora et al., arXiv 2402.18668) as its published configurations have it. The
    BaseConv that the paper takes up (Arora et al., arXiv 2312.04927) is (x W + b1) . (h * x + b2): without the
    projection before the filter, the silu, and the projection after. Tokens have no positions here but their order:
    rotary positions are ignored.

    Args:
        hidden_size: width of input and output.
        filter_size: taps of h, the token itself the last of them; 3 in BASED.
        expansion: channels that are convolved, in multiples of hidden_size; 2 in BASED.

    Raises:
        TypeError, ValueError: a size that is no positive integer.

    Cost: (6 * expansion * hidden_size^2 + 2 * filter_size * expansion * hidden_size) operations a token; a state of
    (filter_size - 1) * expansion * hidden_size numbers.
    """

    is_causal = True

    def __init__(self, hidden_size: int, *, filter_size: int = 3, expansion: int = 2) -> None:
        super().__init__()
        check_at_least_one(filter_size=filter_size, expansion=expansion)
        width = expansion * hidden_size
        self.filter_size = filter_size
        self.input_gate = JoinedLinear(hidden_size, (width, width), bias=True)
        self.filter = nn.Parameter(torch.empty(width, filter_size))
        self.output = nn.Linear(width, hidden_size)
        self.reset_parameters()

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Truncated normals of variance 1 / fan_in, the filter's fan_in its size; the output's times the scale."""
        lecun_normal_(self.input_gate.weight, self.input_gate.in_features)
        lecun_normal_(self.filter, self.filter_size)
        lecun_normal_(self.output.weight, self.output.in_features, scale=residual_scale)
        nn.init.zeros_(self.input_gate.bias)
        nn.init.zeros_(self.output.bias)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        *,
        causal: bool = True,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | PackedDocuments | None = None,
    ) -> Tensor:
        """As `TokenMixer.forward`.

        Raises:
            ValueError: `causal=False`, blocks of more than one token, or `cu_seqlens` that do not fit.
        """
        self._check_causal(causal, block_size)
        if cu_seqlens is not None:
            documents = PackedDocuments.of_row(cu_seqlens, hidden.shape[:2], key_mask)
            return self._mix_packed(hidden, documents)
        return self._mix(hidden, key_mask, None)[0]

    def _check_causal(self, causal: bool, block_size: int | None) -> None:
        if not (causal and block_size in (None, 1)):
            raise ValueError(
                "short-convolution is causal only: its filter reaches back, and nothing was given for ahead"
            )

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ShortConvolutionState:
        """Zeros before the first token; on the device and in the dtype of the filter where they are None."""
        shape = (batch_size, 1, self.filter_size - 1, self.filter.shape[0])
        tail = torch.zeros(shape, device=device or self.filter.device, dtype=dtype or self.filter.dtype)
        return ShortConvolutionState(tail, torch.zeros(batch_size, dtype=torch.int64, device="cpu"))

    @torch.no_grad()
    def extend(
        self,
        hidden: Tensor,
        state: ShortConvolutionState,
        rotation: Rotation | None = None,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, ShortConvolutionState]:
        """As `TokenMixer.extend`."""
        self._check_causal(True, block_size)
        output, tail = self._mix(hidden, key_mask, state.tail)
        state.tail.copy_(tail)
        if key_mask is None:
            state.position += hidden.shape[1]
        else:
            _, state.position = advance_positions(state.position, hidden.shape[1], key_mask)
        return output, state

    def init_span(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SpanState:
        """As `TokenMixer.init_span`: the last inputs of the filter."""
        return SpanState(0, {"tail": self.init_state(batch_size, device, dtype).tail})

    def forward_span(
        self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None
    ) -> tuple[Tensor, SpanState]:
        """As `TokenMixer.forward_span`."""
        before = state.tensors["tail"]
        output, tail = self._mix(hidden, None, before)
        return output, SpanState(state.position + hidden.shape[1], {"tail": tail.to(before.dtype)})

    def alike_position(self, position: int) -> int:
        """As `TokenMixer.alike_position`: all are alike, for before any token the filter sees zeros."""
        return 0

    def why_not_captured(self, state: ShortConvolutionState) -> str | None:
        """As `TokenMixer.why_not_captured`: nothing depends on the position."""
        return None

    def extra_repr(self) -> str:
        """The size of the filter."""
        return f"filter_size={self.filter_size}"

    def _mix_packed(self, hidden: Tensor, documents: PackedDocuments) -> Tensor:
        convolved, gate = self.input_gate(hidden).chunk(2, dim=-1)
        parts = [self._convolve(part, None, None)[0] for part in documents.split(convolved)]
        return self.output(F.silu(documents.join(parts)) * gate)

    def _mix(self, hidden: Tensor, key_mask: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        convolved, gate = self.input_gate(hidden).chunk(2, dim=-1)
        convolved, tail = self._convolve(convolved, key_mask, tail)
        return self.output(F.silu(convolved) * gate), tail

    def _convolve(self, x: Tensor, key_mask: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        convolved, tail = ops.causal_convolution(x[:, None], self.filter[None], key_mask=key_mask, tail=tail)
        return convolved[:, 0], tail
