"""One call of a replaced layer's attention: what it was given, and both ways to answer."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from polysketch.attention import Mechanism, PackedDocuments
from polysketch.integrations.replacement.masks import DeferredMask


@dataclass
class AttentionCall:
    """What a replaced layer was asked to compute; see `observing_attention`.

    Attributes:
        layer: index of the layer.
        mechanism: what took the place of the layer's attention.
        query: (batch, num_heads, length, head_dim), after rotary positions, scaled so that the layer's own attention is
            softmax(query . key / sqrt(head_dim)) whatever the scaling of the architecture: what the mechanism is given.
        key, value: (batch, num_kv_heads, length, head_dim), after rotary positions.
        key_mask: (batch, length) bool, true for a real token; None when all are real.
        documents: those that are packed into the row; None where it is one text.
        given: what the mechanism reads beside them, for `Mechanism.forward`: `hidden`, the layer's input, and
            `unrotated`, query and key before rotary positions, in a layer that has such.
        scaling: the factor on query . key of the architecture itself.
        causal: false in an encoder, and where a decoder attends to one; there key, value and key_mask are the
            encoder's, of a length of their own.
        attention: the layer's attention module.
    """

    layer: int
    mechanism: Mechanism
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    documents: PackedDocuments | None
    given: Mapping[str, Any]
    scaling: float
    causal: bool
    attention: nn.Module = field(repr=False)
    _raw_query: Tensor = field(repr=False)
    _mask: DeferredMask | None = field(repr=False)
    _implementation: str = field(repr=False)
    _options: Mapping[str, Any] = field(repr=False)

    def original(self) -> Tensor:
        """The layer's own attention of these tensors: (batch, num_heads, length, head_dim), differentiable."""
        output, _ = own_attention(
            self.attention,
            self._raw_query,
            self.key,
            self.value,
            self._mask,
            self._implementation,
            self._options,
        )
        return output.transpose(1, 2)

    def replacement(self) -> Tensor:
        """The mechanism's attention of them: (batch, num_heads, length, head_dim), differentiable."""
        if self.documents is not None:
            return self.mechanism.forward_packed(self.query, self.key, self.value, self.documents, **self.given)
        options = {"causal": self.causal, "key_mask": self.key_mask, **self.given}
        return self.mechanism(self.query, self.key, self.value, **options)


def own_attention(
    attention: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    implementation: str,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What the layer computes in the unmodified model, by the implementation that it had.

    Returns:
        (batch, length, num_heads, head_dim), and the weights where the implementation gives them.
    """
    eager: Any = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    function: Any = AttentionInterface().get_interface(implementation, eager)
    mask = mask.original(implementation) if isinstance(mask, DeferredMask) else mask
    return function(attention, query, key, value, mask, **options)
