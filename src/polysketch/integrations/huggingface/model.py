"""Hidden states: the part of our models in transformers that all heads stand on."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from polysketch.attention import PackedDocuments
from polysketch.integrations.huggingface.arguments import refuse_arguments, wants_dict
from polysketch.integrations.huggingface.cache import PolysketchCache
from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.huggingface.hidden_states import BetweenBlocks, takes_hidden_states
from polysketch.integrations.huggingface.packed import take_documents
from polysketch.integrations.huggingface.padding import new_tokens_mask, without_right_padding
from polysketch.integrations.huggingface.pretrained import PolysketchPreTrainedModel
from polysketch.models import TransformerLM


class PolysketchModel(PolysketchPreTrainedModel):
    """Token ids -> hidden states after the final norm.

    Args:
        config: sizes and mechanisms.

    Attributes:
        transformer: the `TransformerLM`.
    """

    def __init__(self, config: PolysketchConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerLM(config.to_model_config())
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in backward; `gradient_checkpointing_enable` sets it."""
        return self.transformer.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.transformer.activation_checkpointing = enabled

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PolysketchCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states of new tokens.

        Without a cache to go on from, and unless `use_cache=True` in evaluation mode, the whole sequence is computed at
        once, with gradients where they are on. Otherwise tokens are read into a state, without gradients.

        Args:
            input_ids: (batch, new) int64: of the new tokens alone where a cache is given.
            attention_mask: (batch, past + new), nonzero for a real token. Padding on the left changes nothing. Padding
                on the right is fine as long as nothing follows it; padding between tokens is refused.
            past_key_values: what an earlier call gave.
            use_cache: whether to give a cache. None: as the configuration says, in evaluation mode; the cache then
                reads these tokens when others follow.
            return_dict: a named output rather than a tuple.
            others: `position_ids` that restart at 0 with each of several documents in one row, or their offsets
                `cu_seq_lens_q`, as `DataCollatorWithFlattening` gives them: each document is a text by itself. Other
                positions must be those that the model counts itself. `output_hidden_states` is understood. Further
                arguments of transformers are accepted as None or False alone.

        Returns:
            `last_hidden_state` (batch, new, hidden_size), and where asked for `past_key_values` and `hidden_states`:
            the embedded tokens and what each block gave, the last after the final norm, each (batch, new, hidden_size).

        Raises:
            ValueError: a mask of another shape or with padding between tokens, right padding with tokens after it,
                positions or offsets that are not understood, documents beside a mask or a cache, or an argument that
                these models do not know.
            TypeError: a cache of another class.
        """
        if input_ids is None:
            raise ValueError("input_ids are needed: these models do not take inputs_embeds")
        _check_cache(past_key_values)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        documents = take_documents(others, input_ids.shape, attention_mask, past)
        wanted, between = takes_hidden_states(others, self.config), BetweenBlocks()
        refuse_arguments({"output_hidden_states": False, **others}, self.config)
        mask = new_tokens_mask(attention_mask, input_ids.shape, past)
        cache: PolysketchCache | None
        with between.watch(self.transformer.blocks, wanted=wanted):
            if documents is not None:
                hidden, cache = self._packed(input_ids, documents, past_key_values, use_cache), None
            elif past or (use_cache and not self.training):  # a state passes no gradient
                cache = past_key_values or PolysketchCache()
                hidden = cache.extend_hidden(self.transformer, input_ids, mask)
            else:
                hidden = self._whole(input_ids, mask)
                cache = self._cache_of_whole(input_ids, mask, past_key_values, use_cache)
        seen = between.and_last(hidden)
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, hidden_states=seen)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()

    def _packed(
        self, input_ids: Tensor, documents: PackedDocuments, cache: PolysketchCache | None, use_cache: bool | None
    ) -> Tensor:
        if use_cache or cache is not None:
            raise ValueError("documents packed into one row leave no cache to go on from: pass use_cache=False")
        return self.transformer.hidden_states(input_ids, cu_seqlens=documents)

    def _whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        key_mask = None if mask is None else without_right_padding(mask)
        return self.transformer.hidden_states(input_ids, key_mask=key_mask)

    def _cache_of_whole(
        self, input_ids: Tensor, mask: Tensor | None, given: PolysketchCache | None, use_cache: bool | None
    ) -> PolysketchCache | None:
        """A cache that reads the tokens when others follow, for their outputs are known."""
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        if given is None and (not wanted or torch.compiler.is_compiling()):
            return None
        cache = PolysketchCache() if given is None else given
        cache.put_off(input_ids, mask)
        return cache


def _check_cache(cache: Any) -> None:
    if cache is not None and not isinstance(cache, PolysketchCache):
        raise TypeError(
            f"expected a PolysketchCache for past_key_values, got {type(cache).__name__}: these models carry a state "
            "instead of keys and values; leave past_key_values out, or begin with PolysketchCache()"
        )
