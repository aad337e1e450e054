"""Masked language models of transformers: an encoder that predicts tokens from both sides."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from polysketch.integrations.huggingface.arguments import wants_dict
from polysketch.integrations.huggingface.averaging import check_labels, divisor
from polysketch.integrations.huggingface.encoder_configuration import PolysketchEncoderConfig
from polysketch.integrations.huggingface.encoder_model import PolysketchEncoderModel, PolysketchEncoderPreTrainedModel
from polysketch.models import MaskedLanguageModel, mean_token_loss


class PolysketchEncoderForMaskedLM(PolysketchEncoderPreTrainedModel):
    """A `MaskedLanguageModel` of any mechanism that sees both sides; the embedding is its output layer, with a bias.

    Args:
        config: sizes and mechanisms.
    """

    def __init__(self, config: PolysketchEncoderConfig) -> None:
        super().__init__(config)
        self.model = PolysketchEncoderModel(config)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    @classmethod
    def from_transformer(cls, transformer: MaskedLanguageModel, **changes: Any) -> "PolysketchEncoderForMaskedLM":
        """Wrap a model of this library, whose weights stay where they are.

        Args:
            transformer: the model.
            **changes: fields of `PolysketchEncoderConfig` that `EncoderConfig` does not have.
        """
        encoder = transformer.encoder
        config = PolysketchEncoderConfig.from_model_config(encoder.config, **changes)
        return cls._around(config, encoder, output_bias=transformer.output_bias)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        return_dict: bool | None = None,
        **others: Any,
    ) -> MaskedLMOutput | tuple:
        """Logits of the tokens that stand, or stood, at each place, and the loss.

        Args:
            input_ids, attention_mask, return_dict, others: as for `PolysketchEncoderModel.forward`.
            labels: (batch, length) int64, the token of each place; -100 where there is nothing to predict.
            num_items_in_batch: divide the summed loss by this number instead of the number of labels.
            skip_logits: with labels, give the loss alone, which never holds the logits of all tokens.

        Returns:
            `loss` (a scalar, nats per token) where there are labels; `logits` (batch, length, vocab_size) unless
            skipped.

        Raises:
            ValueError: as `PolysketchEncoderModel.forward`, or labels of another shape than input_ids.
        """
        hidden, weight = self.encoded(input_ids, attention_mask, others), self.inner.embedding.weight
        loss = None
        if labels is not None:
            check_labels(labels, hidden.shape[:2])
            count = divisor(labels, num_items_in_batch)
            loss = mean_token_loss(hidden, weight, self.output_bias, labels, count)
        skip = skip_logits and labels is not None
        logits = None if skip else nn.functional.linear(hidden, weight, self.output_bias)
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()
