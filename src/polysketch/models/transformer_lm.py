"""The decoder-only language model of the papers ("Transformer++"), for every mechanism."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polysketch.attention import Mechanism, SpanState
from polysketch.distributed import ContextGroup
from polysketch.models.base import TokenModel
from polysketch.models.blocks import build_block
from polysketch.models.carried import CarriedRows, hidden_states_of
from polysketch.models.config import ModelConfig, require_configuration
from polysketch.models.cross_entropy import token_losses
from polysketch.models.mean_cross_entropy import mean_token_loss
from polysketch.models.over_ranks import loss_over_ranks
from polysketch.models.state import ModelState
from polysketch.models.tokens import check_ids, check_targets, positions_of
from polysketch.nn import Rotation, rotation_at, sinusoidal_positions
from polysketch.ops import PackedDocuments
from polysketch.targets import NO_TARGET


class TransformerLM(TokenModel):
    """Token ids -> logits of the next token (PolySketchFormer, appendix I).

    Embedded tokens times sqrt(hidden_size) plus sinusoidal positions, pre-norm blocks with rotary positions in every
    head (both unless the configuration says otherwise) and a GELU-gated linear unit, a final norm, and the embedding
    again as output layer, with a bias. No dropout.
    The factor is that of Vaswani et al. (2017, section 3.4), whom the paper follows here; its published code leaves it
    out, and positions of amplitude 1 then drown embeddings of 1 / sqrt(hidden_size): small models learn far slower.

    Initialisation: the embedding is N(0, 1 / hidden_size). Projections are truncated normals of variance 1 / fan_in.
    Those that add to the residual stream are divided by sqrt(2 num_layers), as in GPT-2; the paper does not say. Norms
    start at 1 and 0, the output bias at 0.

    Args:
        config: sizes and mechanisms.

    Raises:
        TypeError: the configuration is none.

    Attributes:
        config: as given.
        activation_checkpointing: recompute each block in backward instead of keeping what is inside it; False at
            first.
        state_dtype: of new states, see `keep_states_in`; None at first.
    """

    def __init__(self, config: ModelConfig) -> None:
        require_configuration(config, ModelConfig)
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.state_dtype: torch.dtype | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(build_block(config, name, options) for name, options in config.layers())
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self._initialize()

    @property
    def all_blocks(self) -> list[nn.Module]:
        """As `blocks`."""
        return list(self.blocks)

    def forward(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | PackedDocuments | None = None,
    ) -> Tensor:
        """Logits of every token's successor.

        Args:
            ids: (batch, length) int64.
            key_mask: (batch, length) bool, True for a real token; rows are padded on the left.
            cu_seqlens: (documents + 1,) int32 offsets, from 0 to the length, rising, of documents that stand one after
                the other in a single row. Each has positions from 0, and gives what it gives alone.

        Returns:
            (batch, length, vocab_size). Prefer `loss` for training: it never holds all of these.

        Raises:
            TypeError, ValueError: ids that are no tokens, or `cu_seqlens` that do not fit (`ops.PackedDocuments`).
        """
        return self.logits(self.hidden_states(ids, key_mask=key_mask, cu_seqlens=cu_seqlens))

    def hidden_states(
        self,
        ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | PackedDocuments | None = None,
        carried: CarriedRows | None = None,
    ) -> Tensor:
        """(batch, length, hidden_size) after the final norm; arguments as for `forward` and `loss`."""
        if carried is not None:
            return self.final_norm(hidden_states_of(self, ids, carried))
        documents = None if cu_seqlens is None else self._documents(ids, cu_seqlens, key_mask)
        if documents is None:
            hidden, rotation = self._embed(ids, positions_of(ids, key_mask))
        else:
            hidden, rotation = self._embed_packed(ids, documents)
        for block in self.blocks:
            hidden = self._run(block, hidden, rotation, key_mask, documents)
        return self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) after the final norm -> (..., vocab_size)."""
        return nn.functional.linear(hidden, self.embedding.weight, self.output_bias)

    def logits_at(self, asked: Tensor, *, ids: Tensor) -> Tensor:
        """Logits of the successors of some tokens.

        Args:
            asked: (batch, length) bool.
            ids: (batch, length) int64.

        Returns:
            (number of tokens asked, vocab_size), row after row.
        """
        return self.logits(self.hidden_states(ids)[asked])

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each token, in nats, in chunks of tokens: the logits of all are never held.

        Args:
            hidden: (batch, length, hidden_size) from `hidden_states`.
            targets: (batch, length) int64; -100 where there is nothing to predict, which costs 0.

        Returns:
            (batch, length) float32.
        """
        return token_losses(hidden, self.embedding.weight, self.output_bias, targets)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        cu_seqlens: Tensor | PackedDocuments | None = None,
        *,
        context: ContextGroup | None = None,
        carried: CarriedRows | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats; a scalar.

        Args:
            ids: (batch, length) int64.
            targets: (batch, length) int64, what each token is to predict; -100 for nothing, and the mean is over the
                others. When None, tokens predict the next one: ids[:, 1:] from ids[:, :-1], of each document by itself.
            cu_seqlens: as for `forward`, documents in a single row.
            context: the processes that share every row, each of which computes a span of it and is given the whole.
                The gradients of a process are then those of its span: their sum is the gradient
                (`ContextGroup.sum_gradients`).
            carried: in place of `cu_seqlens`, documents some of which began in an earlier call: their tokens see all of
                the document before them, by states through which no gradient passes. Needs `targets`. It has the states
                after the documents that go on, afterwards.

        Raises:
            NotImplementedError: `context` or `carried`, and a layer that has no state of constant size.
            TypeError: as for `forward`.
            ValueError: as for `forward`; targets of another shape or beyond the vocabulary, or nothing to predict:
                fewer than two tokens a row, documents of one token alone, or targets of -100 alone. Targets on a GPU
                are not read for this, and give NaN where nothing is to be predicted.
        """
        if carried is not None:
            return self._loss_of_carried(ids, targets, carried, beside=(cu_seqlens, context))
        if context is not None:
            return self._loss_over_ranks(ids, targets, cu_seqlens, context)
        documents = None if cu_seqlens is None else self._documents(ids, cu_seqlens)
        if targets is None:
            if documents is None:
                return self._loss_of_rows(ids)
            targets = _next_tokens(ids, documents)
        check_targets(ids, targets, self.config.vocab_size)
        return self._mean_loss(self.hidden_states(ids, cu_seqlens=documents), targets)

    def init_spans(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[SpanState]:
        """The states of all layers before the first span of a sequence; device and dtype are the model's where None.

        Raises:
            NotImplementedError: a layer without a state of constant size, by its number.
        """
        device = self.output_bias.device if device is None else device
        dtype = self.output_bias.dtype if dtype is None else dtype
        states = []
        for index, block in enumerate(self.blocks):
            try:
                states.append(block.attention.init_span(batch_size, device, dtype))
            except NotImplementedError as error:
                raise NotImplementedError(f"layer {index}: {error}") from None
        return states

    def begin_span(self, ids: Tensor, position: int) -> tuple[Tensor, Rotation]:
        """(batch, length) ids that begin at `position` -> what the first block takes, and the rotation there."""
        return self._embed(ids, torch.arange(position, position + ids.shape[1], device=ids.device))

    def begin_documents(self, ids: Tensor, documents: PackedDocuments) -> tuple[Tensor, Rotation]:
        """(1, length) ids of whole documents -> what the first block takes, and the rotation of the longest."""
        return self._embed_packed(ids, documents)

    def embed_at(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(batch, length) ids at (length,) or (batch, length) int64 positions -> what the first block takes."""
        self._check_ids(ids)
        embedded = self.embedding(ids) * self.config.hidden_size**0.5
        if self.config.input_positions:
            embedded = embedded + sinusoidal_positions(positions, self.config.hidden_size).to(embedded.dtype)
        return embedded

    def rotation_of(self, positions: Tensor) -> Rotation:
        """What blocks take for such positions."""
        return rotation_at(positions, self.config.head_dim, self.config.rope_base)

    def end_span(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """What the last block gave, and (batch, length) targets -> (batch, length) losses, as `token_losses`."""
        return self.token_losses(self.final_norm(hidden), targets.contiguous())

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ModelState:
        """The state before the first token; device and dtype are the model's where they are None."""
        device = self.output_bias.device if device is None else device
        dtype = (self.state_dtype or self.output_bias.dtype) if dtype is None else dtype
        layers = [block.attention.init_state(batch_size, device, dtype) for block in self.blocks]
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64, device="cpu"), device)

    def keep_states_in(self, dtype: torch.dtype | None) -> None:
        """Make states from now on in half precision, of half the size; None for the model's own dtype again.

        Tokens that a state keeps are rounded once. Sums over tokens are rounded whenever they move on: all computes in
        float32, and what that costs docs/performance.md tells. States of a model in half precision have sums in
        float32, too, until this is called.

        Args:
            dtype: bfloat16 or float16.

        Raises:
            TypeError: another dtype.
            ValueError: a layer's sums cannot be in it, with the layer and the reason; nothing has changed then.
        """
        mechanisms = {index: block.mechanism for index, block in enumerate(self.blocks) if block.mechanism is not None}
        for index, mechanism in mechanisms.items():
            reason = None if dtype is None else mechanism.why_not_sums_in(dtype)
            if reason is not None:
                raise ValueError(f"states cannot be kept in {dtype}: layer {index}: {reason}")
        for mechanism in mechanisms.values():
            mechanism.keep_sums_in(dtype)
        self.state_dtype = dtype

    def why_not_captured(self, state: ModelState) -> str | None:
        """Why a graph of the device that captured `extend` by one token would not serve every token, naming the layer.

        Args:
            state: from `init_state`.

        Returns:
            None where it would: see `Mechanism.why_not_captured`.
        """
        for index, (block, layer) in enumerate(zip(self.blocks, state.layers, strict=True)):
            reason = block.attention.why_not_captured(layer)
            if reason is not None:
                return f"layer {index}: {reason}"
        return None

    def extend(self, ids: Tensor, state: ModelState, *, key_mask: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Logits for new tokens that follow those in `state`; no gradient.

        Args:
            ids: (batch, new tokens) int64.
            state: from `init_state` or an earlier call; updated in place.
            key_mask: (batch, new tokens) bool, True for a real token.

        Returns:
            (batch, new tokens, vocab_size), and the same state.
        """
        hidden, state = self.extend_hidden(ids, state, key_mask=key_mask)
        with torch.no_grad():
            return self.logits(hidden), state

    @torch.no_grad()
    def extend_hidden(
        self, ids: Tensor, state: ModelState, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """As `extend`, giving (batch, new tokens, hidden_size) after the final norm."""
        if ids.shape[0] != state.position.shape[0]:
            raise ValueError(f"the state holds {state.position.shape[0]} rows, got ids of shape {tuple(ids.shape)}")
        positions, next_position = state.next_positions(ids.shape[1], key_mask)
        hidden, rotation = self._embed(ids, positions.to(ids.device))
        for index, block in enumerate(self.blocks):
            hidden, state.layers[index] = block.extend(hidden, state.layers[index], rotation, key_mask=key_mask)
        state.pass_(ids.shape[1], next_position)
        return self.final_norm(hidden), state

    @torch.no_grad()
    def calibrate(self, ids: Tensor) -> None:
        """Set each layer's prefix gain from a batch, layer after layer; call once, before training.

        Layers without a prefix gain are left as they are. Where none has one, nothing is computed.

        Args:
            ids: (batch, length) int64, text like that of training; longer than one local chunk.
        """
        if not any(isinstance(module, Mechanism) and module.is_calibrated for module in self.modules()):
            return
        hidden, rotation = self._embed(ids, positions_of(ids, None))
        for block in self.blocks:
            if block.mechanism is not None and block.mechanism.is_calibrated:
                query, key, _, given = block.attention_inputs(hidden, rotation)
                block.mechanism.calibrate(query, key, hidden=given["hidden"])
            hidden = block(hidden, rotation)

    @torch.no_grad()
    def prefix_shares(self, ids: Tensor) -> dict[int, Tensor]:
        """The share of the attention mass held by the sketched prefix.

        Args:
            ids: (batch, length) int64.

        Returns:
            Layer index -> (num_heads,) shares, for layers with an exact local part and a sketched prefix.
        """
        hidden, rotation = self._embed(ids, positions_of(ids, None))
        shares = {}
        for index, block in enumerate(self.blocks):
            if _has_prefix(block):
                query, key, _, given = block.attention_inputs(hidden, rotation)
                shares[index] = block.mechanism.prefix_share(query, key, **given)
            hidden = block(hidden, rotation)
        return shares

    def remove_prefix(self) -> None:
        """Switch the sketched prefix off in every layer that has one, for an ablation.

        Raises:
            ValueError: no layer has one, so nothing would change.
        """
        with_prefix = [block.mechanism for block in self.blocks if _has_prefix(block)]
        if not with_prefix:
            raise ValueError(
                f"no layer has a sketched prefix to remove: attention is {self.config.attention!r}; "
                "only mechanisms with exact local chunks and a sketch beyond them have one"
            )
        for mechanism in with_prefix:
            mechanism.remove_prefix()

    def _initialize(self) -> None:
        nn.init.normal_(self.embedding.weight, std=self.config.hidden_size**-0.5)
        for block in self.blocks:
            block.reset_parameters(residual_scale=(2 * self.config.num_layers) ** -0.5)

    def _loss_of_rows(self, ids: Tensor) -> Tensor:
        """Of ids[:, 1:] from ids[:, :-1]."""
        if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
            raise ValueError(f"loss needs ids of at least 1 row of at least 2 tokens, got {tuple(ids.shape)}")
        self._check_ids(ids)
        return self._mean_loss(self.hidden_states(ids[:, :-1]), ids[:, 1:])

    def _mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return mean_token_loss(hidden, self.embedding.weight, self.output_bias, targets)

    def _loss_of_carried(
        self, ids: Tensor, targets: Tensor | None, carried: CarriedRows, beside: tuple[Any, Any]
    ) -> Tensor:
        if targets is None or beside != (None, None):
            raise ValueError("rows of documents that go on need targets, and neither cu_seqlens nor context")
        check_targets(ids, targets, self.config.vocab_size)
        return self._mean_loss(self.hidden_states(ids, carried=carried), targets)

    def _loss_over_ranks(
        self,
        ids: Tensor,
        targets: Tensor | None,
        cu_seqlens: Tensor | PackedDocuments | None,
        context: ContextGroup,
    ) -> Tensor:
        documents = None if cu_seqlens is None else self._documents(ids, cu_seqlens)
        if targets is None and documents is not None:
            targets = _next_tokens(ids, documents)
        elif targets is None:
            if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
                raise ValueError(f"loss needs ids of at least 1 row of at least 2 tokens, got {tuple(ids.shape)}")
            ids, targets = ids[:, :-1], ids[:, 1:]
        self._check_ids(ids)
        check_targets(ids, targets, self.config.vocab_size)
        return loss_over_ranks(self, ids, targets, context, documents)

    def _documents(
        self, ids: Tensor, cu_seqlens: Tensor | PackedDocuments, key_mask: Tensor | None = None
    ) -> PackedDocuments:
        self._check_ids(ids)
        return PackedDocuments.of_row(cu_seqlens, ids.shape, key_mask)

    def _embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        return self.embed_at(ids, positions), self.rotation_of(positions)

    def _embed_packed(self, ids: Tensor, documents: PackedDocuments) -> tuple[Tensor, Rotation]:
        """As `_embed`; the rotation is of the longest document's positions, which begin anew in each."""
        embedded = self.embed_at(ids, documents.positions(ids.device))
        return embedded, self.rotation_of(torch.arange(documents.longest, device=ids.device))

    def _check_ids(self, ids: Tensor) -> None:
        check_ids(ids, self.config.vocab_size, self.output_bias.device)

    def _run(
        self,
        block: nn.Module,
        hidden: Tensor,
        rotation: Rotation,
        key_mask: Tensor | None,
        documents: PackedDocuments | None,
    ) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, hidden, rotation, key_mask=key_mask, cu_seqlens=documents, use_reentrant=False)
        return block(hidden, rotation, key_mask=key_mask, cu_seqlens=documents)


def _next_tokens(ids: Tensor, documents: PackedDocuments) -> Tensor:
    """What each token is to predict; nothing where a document ends."""
    targets = ids.roll(-1, 1)
    targets[:, documents.last_tokens(ids.device)] = NO_TARGET
    return targets


def _has_prefix(block: Any) -> bool:
    return block.mechanism is not None and block.mechanism.has_prefix
