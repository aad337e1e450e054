"""What diffusers calls in an attention layer, with a mechanism in the place of softmax."""

from typing import Any

from torch import Tensor, nn

from polysketch.attention import Mechanism
from polysketch.integrations.key_masks import key_mask_of


class MechanismProcessor(nn.Module):
    """An attention processor of `diffusers.models.attention_processor.Attention`, for self- and cross-attention.

    With the mechanism `softmax` it gives what `AttnProcessor2_0` gives, and with `linear` of the kind `relu` what
    `SanaLinearAttnProcessor2_0` gives. The layer's own projections, norms and residual connection stay. The processor
    becomes a part of the layer, so that the mechanism's weights are trained and saved with the model.

    Args:
        mechanism: that sees both sides, of the layer's heads and their width.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.mechanism = mechanism

    # diffusers reads from the signature of __call__ which arguments a processor takes.
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            attn: the layer.
            hidden_states: (batch, length, channels), or a picture (batch, channels, height, width).
            encoder_hidden_states: (batch, source length, source channels); None for self-attention.
            attention_mask: (batch, keys) or (batch, 1, keys), padding alone: bool, or numbers added to logits, as
                diffusers makes them (`key_mask_of`). A mechanism that has no real key gives zeros.
            temb: of the time step, for layers with a spatial norm.

        Returns:
            Shaped like `hidden_states`.

        Raises:
            ValueError: a mask of pairs, or what the mechanism refuses.
        """
        normed = hidden_states if attn.spatial_norm is None else attn.spatial_norm(hidden_states, temb)
        tokens = normed.flatten(2).transpose(1, 2) if normed.dim() == 4 else normed
        if attn.group_norm is not None:
            tokens = attn.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
        source = tokens if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            source = attn.norm_encoder_hidden_states(source)
        value = self._heads(attn.to_v(source), None)
        query = self._heads(attn.to_q(tokens), attn.norm_q).to(value.dtype)
        key = self._heads(attn.to_k(source), attn.norm_k).to(value.dtype)
        mask = None if attention_mask is None else _padding(attention_mask, *source.shape[:2])
        attended = self.mechanism(query, key, value, causal=False, key_mask=mask, hidden=tokens)
        output = attn.to_out[1](attn.to_out[0](attended.transpose(1, 2).flatten(2)))
        if hidden_states.dim() == 4:
            output = output.transpose(1, 2).reshape(hidden_states.shape)
        if attn.residual_connection:
            output = output + hidden_states
        return output / attn.rescale_output_factor

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """(batch, length, width) -> (batch, heads, length, head_dim); a norm is of all heads together, or of each."""
        together = norm is not None and _width(norm) == projected.shape[-1]
        if norm is not None and together:
            projected = norm(projected)
        heads = projected.unflatten(-1, (-1, self.mechanism.head_dim)).transpose(1, 2)
        return heads if norm is None or together else norm(heads)


def _width(norm: nn.Module) -> int | None:
    """How many channels it is over; None for one that takes any number."""
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    return shape[-1] if isinstance(shape, tuple) else None


def _padding(mask: Tensor, batch: int, keys: int) -> Tensor:
    """The mask without an axis of queries that says nothing; else as it is, to be refused."""
    return key_mask_of(mask[:, 0] if mask.dim() == 3 and mask.shape[1] == 1 else mask, batch, keys)
