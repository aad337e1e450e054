"""The projections around an attention mechanism."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polysketch.attention import Mechanism, SpanState
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.nn.head_gate import HeadGate
from polysketch.nn.joined_linear import JoinedLinear
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.norm_and_rotation import norm_and_rotate
from polysketch.nn.projection_convolution import ProjectionConvolution, ProjectionConvolutionState
from polysketch.nn.query_key_norm import QueryKeyNorm
from polysketch.nn.rope import Rotation
from polysketch.ops import PackedDocuments

_PROJECTED = "projected"
"""The name, in a span's state, of the last projections before the convolution."""


class MechanismInputs(NamedTuple):
    """What a layer gives its mechanism.

    Attributes:
        query: (batch, num_heads, length, head_dim).
        key: (batch, num_kv_heads, length, head_dim).
        value: (batch, num_kv_heads, length, head_dim).
        given: `hidden`, the layer's input, and `unrotated` where the mechanism reads it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    given: dict[str, Any]


class SelfAttention(TokenMixer):
    """Projections to query, key and value, rotary positions, a mechanism, and the output projection; no biases.

    Around it, each only where asked for: convolution of the projections, then the norm of queries and keys, then
    rotary positions, the mechanism, gates, output projection. Rotary positions come before the mechanism, and so
    before its own layer norms of queries and keys, if it has any. Norm and gates start as the identity. Drawing the
    weights takes the same random numbers with any of the three as without.

    With a convolution the layer starts with induction in every second head, or in all of them (`induction_every`): a
    token's key there equals the query of the token before it, so that a query finds what followed earlier tokens like
    itself. In the other heads the key equals the query of the same token. Where several query heads share a key head,
    the first of them is meant. Without these weights a model must find induction by itself, which takes a large part of
    a short training (docs/results-tried.md).

    Args:
        hidden_size: width of input and output.
        mechanism: what attends; the numbers of heads and their width are its own.
        projection_convolution: taps of the causal convolution of queries, keys and values (`ProjectionConvolution`);
            0 for none.
        query_key_norm: norm queries and keys (`QueryKeyNorm`).
        head_gate: gate the output of every head by the layer's input (`HeadGate`).
        induction_every: the first of so many key heads starts with induction, where there is a convolution: 1 for all.
    """

    def __init__(
        self,
        hidden_size: int,
        mechanism: Mechanism,
        *,
        projection_convolution: int = 0,
        query_key_norm: bool = False,
        head_gate: bool = False,
        induction_every: int = 2,
    ) -> None:
        super().__init__()
        self.induction_every = induction_every
        query_width = mechanism.num_heads * mechanism.head_dim
        key_width = mechanism.num_kv_heads * mechanism.head_dim
        self.query_key_value = JoinedLinear(hidden_size, (query_width, key_width, key_width), bias=False)
        self.mechanism = mechanism
        self.output = nn.Linear(query_width, hidden_size, bias=False)
        width, normed_heads = query_width + 2 * key_width, mechanism.num_heads + mechanism.num_kv_heads
        self.convolution = ProjectionConvolution(width, projection_convolution) if projection_convolution else None
        self.query_key_norm = QueryKeyNorm(normed_heads, mechanism.head_dim) if query_key_norm else None
        self.head_gate = HeadGate(hidden_size, mechanism.num_heads) if head_gate else None
        self.reset_parameters()

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Truncated normals of variance 1 / fan_in; the standard deviation of the output times `residual_scale`."""
        lecun_normal_(self.query_key_value.weight, self.query_key_value.in_features)
        lecun_normal_(self.output.weight, self.output.in_features, scale=residual_scale)
        for part in (self.convolution, self.query_key_norm, self.head_gate):
            if part is not None:
                part.reset_parameters()
        if self.convolution is not None and self.convolution.size > 1:
            self._start_with_induction(self.convolution)

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
        """Attend over a whole sequence; as `TokenMixer.forward`.

        Raises:
            ValueError: `causal=False` or blocks where projections are convolved, `cu_seqlens` that do not fit, or a
                `block_size` that the mechanism refuses.
        """
        self._check_convolution(causal, block_size)
        if hidden.shape[1] == 0:
            return hidden  # a convolution needs a token
        blocks = {} if block_size is None else {"block_size": block_size}
        if cu_seqlens is not None:
            documents = PackedDocuments.of_row(cu_seqlens, hidden.shape[:2], key_mask)
            return self.finish(
                self._attend_packed(hidden, rotation, documents, causal=causal, block_size=block_size), hidden
            )
        query, key, value, given = self.project(hidden, rotation, key_mask=key_mask)
        attended = self.mechanism(query, key, value, causal=causal, key_mask=key_mask, **blocks, **given)
        return self.finish(attended, hidden)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The mechanism's state before the first token; with a convolution, a `ProjectionConvolutionState`."""
        state = self.mechanism.init_state(batch_size, device, dtype)
        if self.convolution is None:
            return state
        return ProjectionConvolutionState(state, self.convolution.init_tail(batch_size, device, dtype))

    def extend(
        self,
        hidden: Tensor,
        state: Any,
        rotation: Rotation | None = None,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Attend from new tokens to all tokens so far; arguments as for `forward`, and a state from `init_state`."""
        self._check_convolution(True, block_size)
        if hidden.shape[1] == 0:
            return hidden, state
        projected = self.query_key_value(hidden)
        if self.convolution is None:
            query, key, value, given = self.heads(projected, rotation, hidden)
            if block_size is not None:
                given["block_size"] = block_size
            attended, state = self.mechanism.extend(query, key, value, state, key_mask=key_mask, **given)
            return self.finish(attended, hidden), state
        projected, tail = self.convolution(projected, key_mask=key_mask, tail=state.tail)
        query, key, value, given = self.heads(projected, rotation, hidden)
        attended, state.attention = self.mechanism.extend(
            query, key, value, state.attention, key_mask=key_mask, **given
        )
        state.tail.copy_(tail.detach())
        return self.finish(attended, hidden), state

    def init_span(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SpanState:
        """The mechanism's; with a convolution, the last projections too."""
        state = self.mechanism.init_span(batch_size, device, dtype)
        if self.convolution is None:
            return state
        tail = self.convolution.init_tail(batch_size, device, dtype)
        return SpanState(state.position, {_PROJECTED: tail, **state.tensors})

    def forward_span(
        self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None
    ) -> tuple[Tensor, SpanState]:
        """As `TokenMixer.forward_span`."""
        (query, key, value, given), own = self._project_span(hidden, state, rotation)
        attended, after = self.mechanism.forward_span(query, key, value, state, **given)
        return self.finish(attended, hidden), SpanState(after.position, {**own, **after.tensors})

    def alike_position(self, position: int) -> int:
        """As `TokenMixer.alike_position`: the mechanism's own answer, for before any token a convolution sees zeros."""
        return self.mechanism.alike_position(position)

    def adds_up(self, position: int) -> bool:
        """As `TokenMixer.adds_up`: the mechanism's own answer."""
        return self.mechanism.adds_up(position)

    @property
    def halo(self) -> int:
        """What the convolution reaches back."""
        return 0 if self.convolution is None else self.convolution.size - 1

    def halo_tensors(self, hidden: Tensor) -> dict[str, Tensor]:
        """As `TokenMixer.halo_tensors`: the projections of these tokens."""
        return {} if self.convolution is None else {_PROJECTED: self.query_key_value(hidden)[:, None]}

    def span_sums(self, hidden: Tensor, state: SpanState, rotation: Rotation | None = None) -> dict[str, Tensor]:
        """As `TokenMixer.span_sums`."""
        (query, key, value, given), _ = self._project_span(hidden, state, rotation)
        return self.mechanism.span_sums(query, key, value, hidden=given["hidden"])

    def _project_span(
        self, hidden: Tensor, state: SpanState, rotation: Rotation | None
    ) -> tuple[MechanismInputs, dict[str, Tensor]]:
        """What the mechanism is given of a span, and the last projections."""
        projected = self.query_key_value(hidden)
        if self.convolution is None:
            return self.heads(projected, rotation, hidden), {}
        before = state.tensors[_PROJECTED]
        projected, tail = self.convolution(projected, tail=before.to(projected.dtype))
        return self.heads(projected, rotation, hidden), {_PROJECTED: tail.to(before.dtype)}

    def why_not_captured(self, state: Any) -> str | None:
        """The mechanism's own answer: a convolution does the same at every position."""
        return self.mechanism.why_not_captured(state if self.convolution is None else state.attention)

    def project(
        self, hidden: Tensor, rotation: Rotation | None = None, *, key_mask: Tensor | None = None
    ) -> MechanismInputs:
        """What the mechanism is given of a whole sequence.

        Queries, keys and values are convolved, and queries and keys normed, where the layer does so; the first two are
        rotated.
        """
        projected = self.query_key_value(hidden)
        if self.convolution is not None:
            projected, _ = self.convolution(projected, key_mask=key_mask)
        return self.heads(projected, rotation, hidden)

    def _attend_packed(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        documents: PackedDocuments,
        *,
        causal: bool,
        block_size: int | None = None,
    ) -> Tensor:
        """(1, num_heads, length, head_dim): projected packed, then convolved, rotated and attended to by documents."""
        projected = documents.split(self.query_key_value(hidden))
        rotations = _rotations(rotation, documents)
        of_tokens = documents.split(hidden) if self.mechanism.reads_hidden else projected  # ignored by the others
        attended, options = [], {"causal": causal, **({} if block_size is None else {"block_size": block_size})}
        for number, mask in enumerate(documents.masks_for(hidden.device, causal=causal, block_size=block_size)):
            rows = projected[number]
            if self.convolution is not None:
                rows, _ = self.convolution(rows)
            query, key, value, given = self.heads(rows, rotations[number], of_tokens[number])
            attended.append(self.mechanism(query, key, value, key_mask=mask, **options, **given))
        return documents.join(attended, 2)

    def _check_convolution(self, causal: bool, block_size: int | None) -> None:
        if self.convolution is not None and not (causal and block_size in (None, 1)):
            raise ValueError(
                "projection_convolution is causal only: its filters reach back, and nothing was given for ahead"
            )

    def heads(self, projected: Tensor, rotation: Rotation | None, hidden: Tensor) -> MechanismInputs:
        """What the mechanism is given, of (batch, length, width) projections that are convolved already.

        Args:
            projected: by `query_key_value`, and the convolution where there is one.
            rotation: of the tokens' positions; no rotary positions when None.
            hidden: (batch, length, hidden_size), the layer's input.
        """
        heads = projected.unflatten(-1, (-1, self.mechanism.head_dim))
        num_heads, num_kv_heads = self.mechanism.num_heads, self.mechanism.num_kv_heads
        # Split before it is transposed: gradients are put together as the projection takes them, without a copy.
        matched, value = (part.transpose(1, 2) for part in heads.split((num_heads + num_kv_heads, num_kv_heads), 2))
        unrotated, matched = norm_and_rotate(
            matched, self.query_key_norm, rotation, keep_unrotated=self.mechanism.reads_unrotated
        )
        given: dict[str, Any] = {"hidden": hidden}
        if unrotated is not None:
            given["unrotated"] = unrotated.split((num_heads, num_kv_heads), 1)
        query, key = matched.split((num_heads, num_kv_heads), 1)
        return MechanismInputs(query, key, value, given)

    @torch.no_grad()
    def _start_with_induction(self, convolution: ProjectionConvolution) -> None:
        """Keys are queries of the same head: the token before's where it has induction, its own in others."""
        num_heads, num_kv_heads = self.mechanism.num_heads, self.mechanism.num_kv_heads
        heads = self.query_key_value.weight.unflatten(0, (-1, self.mechanism.head_dim))
        heads[num_heads : num_heads + num_kv_heads] = heads[: num_heads : num_heads // num_kv_heads]
        filters = convolution.filter[0].unflatten(0, (-1, self.mechanism.head_dim))
        shifted = filters[num_heads : num_heads + num_kv_heads : self.induction_every]
        shifted.copy_(shifted.roll(-1, dims=-1))

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What the mechanism gave, (batch, heads, length, head_dim) -> (batch, length, hidden_size).

        Gates, from the layer's input `hidden`, where the layer has them, and the output projection.
        """
        if self.head_gate is not None:
            attended = self.head_gate(attended, hidden)
        return self.output(attended.transpose(1, 2).flatten(2))


def _rotations(rotation: Rotation | None, documents: PackedDocuments) -> list[Rotation | None]:
    """For each group of documents the rotation from position 0 to the end of its longest."""
    if rotation is None:
        return [None] * len(documents.groups)
    if rotation.cos.shape[0] != documents.longest:
        raise ValueError(
            f"the rotation must be of positions 0 to {documents.longest - 1}, the longest document's, which every "
            f"document begins anew, got {tuple(rotation.cos.shape)}"
        )
    return [Rotation(rotation.cos[: group.length], rotation.sin[: group.length]) for group in documents.groups]
