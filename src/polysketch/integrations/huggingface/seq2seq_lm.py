"""Sequence to sequence in transformers: logits, loss and generation."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import Seq2SeqLMOutput

from polysketch.integrations.huggingface.arguments import for_the_model, wants_dict
from polysketch.integrations.huggingface.averaging import check_labels, divisor
from polysketch.integrations.huggingface.cache import give_cache
from polysketch.integrations.huggingface.encoder_decoder_cache import PolysketchEncoderDecoderCache
from polysketch.integrations.huggingface.encoder_decoder_configuration import PolysketchEncoderDecoderConfig
from polysketch.integrations.huggingface.encoder_decoder_model import (
    PolysketchEncoderDecoderModel,
    PolysketchEncoderDecoderPreTrainedModel,
    check_rows,
)
from polysketch.integrations.huggingface.padding import refuse_right_padding, start_behind_padding
from polysketch.models import TransformerEncoderDecoder, mean_token_loss
from polysketch.targets import NO_TARGET


class PolysketchForSeq2SeqLM(PolysketchEncoderDecoderPreTrainedModel, GenerationMixin):
    """A `TransformerEncoderDecoder` of any mechanisms, for `generate`, `Seq2SeqTrainer` and PEFT.

    Args:
        config: sizes and mechanisms.
    """

    def __init__(self, config: PolysketchEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.model = PolysketchEncoderDecoderModel(config)
        self.post_init()

    @classmethod
    def from_transformer(cls, transformer: TransformerEncoderDecoder, **changes: Any) -> "PolysketchForSeq2SeqLM":
        """Wrap a model of this library, whose weights stay where they are.

        Args:
            transformer: the model.
            **changes: fields of `PolysketchEncoderDecoderConfig` that `EncoderDecoderConfig` does not have.
        """
        config = PolysketchEncoderDecoderConfig.from_model_config(transformer.config, **changes)
        return cls._around(config, transformer)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: PolysketchEncoderDecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Seq2SeqLMOutput | tuple:
        """Logits of the successors of the target's tokens, and the loss.

        Args:
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, past_key_values,
                use_cache, return_dict, others: as for `PolysketchEncoderDecoderModel.forward`.
            labels: (batch, length) int64, what is to be written, without the start token: token i of the target
                predicts label i. -100 where there is nothing to predict. Without `decoder_input_ids` the target is made
                of them.
            logits_to_keep: give logits of so many last tokens, or of the tokens with these indices; 0 for all.
            num_items_in_batch: divide the summed loss by this number instead of the number of labels.
            skip_logits: with labels, give the loss alone, which never holds the logits of all tokens.

        Returns:
            `loss` (a scalar, nats per token) where there are labels; `logits` (batch, kept, vocab_size) unless skipped;
            `past_key_values` and `encoder_last_hidden_state` as for `PolysketchEncoderDecoderModel.forward`.

        Raises:
            ValueError: as `PolysketchEncoderDecoderModel.forward`, or labels of another shape than the target, or of
                other rows than the source.
        """
        if decoder_input_ids is None and labels is not None:
            source = input_ids if encoder_outputs is None else encoder_outputs[0]
            if past_key_values is None and source is not None and source.dim() > 1:  # else the model says what is wrong
                check_rows("labels", labels, source)
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **others,
        )
        hidden, inner, loss = found.last_hidden_state, self.inner, None
        if labels is not None:
            check_labels(labels, hidden.shape[:2])
            count = divisor(labels, num_items_in_batch)
            loss = mean_token_loss(hidden, inner.embedding.weight, inner.output_bias, labels, count)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        skip = skip_logits and labels is not None
        output = Seq2SeqLMOutput(
            loss=loss,
            logits=None if skip else inner.logits(hidden[:, kept]),
            past_key_values=found.past_key_values,
            encoder_last_hidden_state=found.encoder_last_hidden_state,
        )
        return output if wants_dict(return_dict, self.config) else output.to_tuple()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(batch, length) labels -> the target that predicts them: the start token, and then all labels but the last.

        Where nothing is to be predicted stands the start token, too.

        Raises:
            ValueError: labels of another shape.
        """
        if labels.dim() != 2:
            raise ValueError(f"expected labels of shape (batch, length), found {tuple(labels.shape)}")
        start = self.config.decoder_start_token_id
        target = labels.new_full(labels.shape, start)
        target[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == NO_TARGET, start)
        return target

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers has it, but for guesses of an assistant.

        Raises:
            ValueError: an `assistant_model`.
        """
        if kwargs.get("assistant_model") is not None:
            raise ValueError("models that read one sequence and write another take no assistant_model: leave it out")
        return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What `generate` gives the next call; refuses targets that end in padding.

        Raises:
            ValueError: padding on the right, from where generation would go on.
        """
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None:
            refuse_right_padding(mask.bool())
        return super().prepare_inputs_for_generation(input_ids, *args, **for_the_model(kwargs))

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class has it; behind the padding of a target that is padded on the left."""
        given = kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[2]
        before = given.get("decoder_attention_mask")
        ids, given = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        mask = given.get("decoder_attention_mask")
        if mask is before or mask.shape != ids.shape:  # no start token was put before them, or the mask does not fit
            return ids, given
        moved, mask = start_behind_padding(ids, mask)
        return moved, {**given, "decoder_attention_mask": mask}

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool:
        """Give `generate` a cache of our own."""
        if not give_cache(PolysketchEncoderDecoderCache, generation_config, model_kwargs):
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        return True
