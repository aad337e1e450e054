"""The mask of a replaced model: which tokens are real, and on demand what the model's own attention would be given."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from polysketch.attention import PackedDocuments
from polysketch.integrations.packed_rows import OFFSETS, packed_documents


class DeferredMask:
    """Travels from transformers' masking code to the attention functions in place of a tensor.

    Mechanisms want to know which tokens are padding, (batch, length). The model's own attention may want a mask of all
    pairs, which nobody should make for a model whose layers were all replaced; so it is made when first asked for.

    Args:
        arguments: what transformers gives a mask function, by keyword.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._original: dict[str, Any] = {}
        self._real: tuple[Tensor | None] | None = None
        self._same_past = False
        self._documents: tuple[PackedDocuments | None] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the mask is causal with padding and perhaps a window, and not made of packed sequences besides.

        transformers says so by letting an implementation leave the mask out where nothing is padded.
        """
        return bool(self._arguments.get("allow_is_causal_skip", True))

    @property
    def is_plain_on_both_sides(self) -> bool:
        """The same of an encoder's mask: padding alone. A causal one knows nothing of the skip."""
        return bool(self._arguments.get("allow_is_bidirectional_skip", False))

    @property
    def knows_padding(self) -> bool:
        """Whether the caller gave a mask."""
        return self._arguments["attention_mask"] is not None

    def key_mask(self) -> Tensor | None:
        """(batch, new tokens) bool, true for a real token; None where all are real.

        Raises:
            ValueError: a mask of another length than the tokens so far.
        """
        if self._real is None:
            self._real = (self._new_tokens(),)
        return self._real[0]

    def require_same_past(self, padding: Tensor | None) -> None:
        """Refuse a mask that hides another number of tokens of the past than the state has left out.

        Args:
            padding: (batch,) tokens of the past that the state has left out; None for none.

        Raises:
            ValueError: another number of them is hidden now.
        """
        mask: Tensor | None = self._arguments["attention_mask"]
        if mask is None or self._same_past or torch.compiler.is_compiling():
            return
        hidden = (mask[:, : int(self._arguments["q_offset"])] == 0).sum(1)
        if bool((hidden != (0 if padding is None else padding.to(hidden.device))).any()):
            raise ValueError(
                f"attention_mask hides {hidden.tolist()} tokens of the past of each row, and the states in the cache "
                f"were made with {[0] * len(hidden) if padding is None else padding.tolist()} hidden: a state cannot "
                "forget a token. Mark padding when it is first given, or begin with a new cache"
            )
        self._same_past = True

    def source_mask(self) -> Tensor | None:
        """(batch, source length) bool, true for a real token of the encoder's; None where all are real."""
        if self._real is None:
            self._real = (_hiding(self._arguments["attention_mask"]),)
        return self._real[0]

    def _new_tokens(self) -> Tensor | None:
        mask: Tensor | None = self._arguments["attention_mask"]
        if mask is None:
            return None
        before, new = int(self._arguments["q_offset"]), int(self._arguments["q_length"])
        if mask.shape[1] != before + new:
            raise ValueError(
                f"attention_mask must cover all tokens so far, {before} in the cache and {new} new ones, got "
                f"{tuple(mask.shape)}"
            )
        return _hiding(mask[:, before:])

    def documents(self, options: Mapping[str, Any], row: torch.Size) -> PackedDocuments | None:
        """The documents of a packed row, found once for all layers; None where a row is one text.

        They are recognised as transformers recognises them, by positions that restart where no mask is given. Beside a
        cache it does not look at positions, and its mask is plain: there they are found to be refused.

        Args:
            options: of the attention function: `position_ids`, and offsets where the caller gave them.
            row: (rows, length) of the new tokens.

        Raises:
            TypeError, ValueError: positions or offsets that are not understood, or offsets where positions do not
                restart: the model's other layers and its positions would know nothing of them.
        """
        if self._documents is None:
            positions = options.get("position_ids")
            told = not self.is_plain or any(options.get(name) is not None for name in OFFSETS)
            several = positions is not None and positions.shape[-1] > 1 and not self.knows_padding
            self._documents = (packed_documents(positions, options, row) if told or several else None,)
        return self._documents[0]

    def original(self, implementation: str) -> Any:
        """What the attention `implementation` of transformers would have been given: made once for all layers."""
        if implementation not in self._original:
            self._original[implementation] = AttentionMaskInterface()[implementation](**self._arguments)
        return self._original[implementation]


def _hiding(mask: Tensor | None) -> Tensor | None:
    """The mask as bool; None where it hides nothing. A compiled model cannot branch on what is in it, and keeps it."""
    if mask is None or (not torch.compiler.is_compiling() and bool(mask.all())):
        return None
    return mask.bool()


def defer_mask(**arguments: Any) -> DeferredMask:
    """The mask function that is registered: it computes nothing yet."""
    return DeferredMask(arguments)
