"""Language models of transformers: logits, loss and generation."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from polysketch.attention import PackedDocuments
from polysketch.integrations.huggingface.arguments import for_the_model, wants_dict
from polysketch.integrations.huggingface.averaging import check_labels, divisor
from polysketch.integrations.huggingface.cache import PolysketchCache, give_cache
from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.huggingface.model import PolysketchModel
from polysketch.integrations.huggingface.packed import take_documents
from polysketch.integrations.huggingface.padding import refuse_empty_rows, refuse_right_padding
from polysketch.integrations.huggingface.pretrained import PolysketchPreTrainedModel
from polysketch.models import TransformerLM, mean_token_loss
from polysketch.targets import NO_TARGET


class PolysketchForCausalLM(PolysketchPreTrainedModel, GenerationMixin):
    """A `TransformerLM` of any mechanism, for `generate`, `Trainer`, `pipeline` and PEFT.

    Args:
        config: sizes and mechanisms.
    """

    def __init__(self, config: PolysketchConfig) -> None:
        super().__init__(config)
        self.model = PolysketchModel(config)
        self.post_init()

    @classmethod
    def from_transformer(cls, transformer: TransformerLM, **changes: Any) -> "PolysketchForCausalLM":
        """Wrap a model of this library, whose weights stay where they are.

        Args:
            transformer: the model.
            **changes: fields of `PolysketchConfig` that `ModelConfig` does not have.
        """
        return cls._around(PolysketchConfig.from_model_config(transformer.config, **changes), transformer)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PolysketchCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the tokens' successors, and the loss.

        Args:
            input_ids, attention_mask, past_key_values, use_cache, return_dict: as for `PolysketchModel.forward`.
            labels: (batch, length) int64, usually the input_ids: token i predicts label i + 1. -100 where there is
                nothing to predict. A document's last token in a packed row never predicts the next document.
            logits_to_keep: give logits of so many last tokens, or of the tokens with these indices; 0 for all.
            num_items_in_batch: divide the summed loss by this number instead of the number of labels.
            skip_logits: with labels, give the loss alone: the logits of 32k tokens and 32k ids take 4 GB, and the loss
                never holds them.
            others: as for `PolysketchModel.forward`: packed documents are understood, inputs_embeds and more refused.

        Returns:
            `loss` (a scalar, nats per token) where there are labels; `logits` (batch, kept, vocab_size) unless skipped;
            `past_key_values` and `hidden_states` as for `PolysketchModel.forward`.

        Raises:
            ValueError: as `PolysketchModel.forward`, or labels of another shape than input_ids.
        """
        documents = None
        if input_ids is not None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            documents = take_documents(others, input_ids.shape, attention_mask, past)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            cu_seq_lens_q=documents,
            **others,
        )
        hidden = output.last_hidden_state
        loss = None if labels is None else self._loss(hidden, labels, num_items_in_batch, documents)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        skip = skip_logits and labels is not None
        logits = None if skip else self.inner.logits(hidden[:, kept])
        given = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)
        given.hidden_states = output.hidden_states
        return given if wants_dict(return_dict, self.config) else given.to_tuple()

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What `generate` gives the next call; refuses rows that end in padding.

        Raises:
            ValueError: padding on the right, from where generation would go on.
        """
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            refuse_right_padding(mask.bool())
        return super().prepare_inputs_for_generation(input_ids, *args, **for_the_model(kwargs))

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        num_items: Tensor | int | None,
        documents: PackedDocuments | None,
    ) -> Tensor:
        check_labels(labels, hidden.shape[:2])
        targets = labels[:, 1:]
        if documents is not None:
            targets = targets.index_fill(1, documents.last_tokens(targets.device)[:-1], NO_TARGET)
        output = self.inner.embedding.weight, self.inner.output_bias
        return mean_token_loss(hidden[:, :-1], *output, targets, divisor(targets, num_items))

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool:
        """Give `generate` a cache of our own; refuses rows of padding alone.

        Here and not in every call: the first part of a prompt that is read in parts may be padding alone.

        Raises:
            ValueError: a row of padding alone, or a kind of cache that is not ours.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            refuse_empty_rows(mask.bool())
        if not give_cache(PolysketchCache, generation_config, model_kwargs):
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        return True
