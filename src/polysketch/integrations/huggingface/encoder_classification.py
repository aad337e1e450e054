"""Encoders of transformers that give each text, or each token, a class."""

from typing import Any, Self

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput

from polysketch.integrations.huggingface.arguments import wants_dict
from polysketch.integrations.huggingface.averaging import averaged, check_labels
from polysketch.integrations.huggingface.encoder_configuration import PolysketchEncoderConfig
from polysketch.integrations.huggingface.encoder_model import PolysketchEncoderModel, PolysketchEncoderPreTrainedModel
from polysketch.models import SequenceClassifier, TokenClassifier
from polysketch.models.encoder import pooled
from polysketch.targets import NO_TARGET


class _Classifier(PolysketchEncoderPreTrainedModel):
    """An encoder with a linear layer behind it."""

    def __init__(self, config: PolysketchEncoderConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PolysketchEncoderModel(config)
        self.output = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def _of_classifier(cls, transformer: SequenceClassifier | TokenClassifier, changes: dict[str, Any]) -> Any:
        labels = {} if "id2label" in changes else {"num_labels": transformer.output.out_features}
        config = PolysketchEncoderConfig.from_model_config(transformer.encoder.config, **labels, **changes)
        return cls._around(config, transformer.encoder, output=transformer.output)


class PolysketchEncoderForSequenceClassification(_Classifier):
    """A `SequenceClassifier`: scores = W p + b, p the mean of the vectors of real tokens, or that of the first one.

    Args:
        config: sizes and mechanisms; `classifier_pooling`; `num_labels` and `problem_type` as everywhere in
            transformers.
    """

    accepts_loss_kwargs = False  # a mean over texts, which Trainer has to divide by its steps of accumulation

    @classmethod
    def from_transformer(cls, transformer: SequenceClassifier, **changes: Any) -> Self:
        """Wrap a model of this library, whose weights stay where they are.

        Args:
            transformer: the model.
            **changes: fields of `PolysketchEncoderConfig` that `EncoderConfig` does not have, for instance `id2label`.
        """
        return cls._of_classifier(transformer, {"classifier_pooling": transformer.pooling, **changes})

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput | tuple:
        """Scores of each text, and the loss.

        Args:
            input_ids, attention_mask, return_dict, others: as for `PolysketchEncoderModel.forward`.
            labels: (batch,) int64 classes, (batch,) floating for regression, (batch, num_labels) for several labels.

        Returns:
            `logits` (batch, num_labels), and `loss` where there are labels.

        Raises:
            ValueError: as `PolysketchEncoderModel.forward`.
        """
        hidden = self.encoded(input_ids, attention_mask, others)
        real = None if attention_mask is None else attention_mask.bool().to(hidden.device)
        logits = self.output(pooled(hidden, real, self.config.classifier_pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()


class PolysketchEncoderForTokenClassification(_Classifier):
    """A `TokenClassifier`: scores = W h + b of each token's vector h.

    Args:
        config: sizes and mechanisms; `num_labels` as everywhere in transformers.
    """

    @classmethod
    def from_transformer(cls, transformer: TokenClassifier, **changes: Any) -> Self:
        """Wrap a model of this library, whose weights stay where they are.

        Args:
            transformer: the model.
            **changes: fields of `PolysketchEncoderConfig` that `EncoderConfig` does not have, for instance `id2label`.
        """
        return cls._of_classifier(transformer, changes)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> TokenClassifierOutput | tuple:
        """Scores of each token, and the loss.

        Args:
            input_ids, attention_mask, return_dict, others: as for `PolysketchEncoderModel.forward`.
            labels: (batch, length) int64, the class of each token; -100 where there is none.
            num_items_in_batch: divide the summed loss by this number instead of the number of labels.

        Returns:
            `logits` (batch, length, num_labels), and `loss` where there are labels.

        Raises:
            ValueError: as `PolysketchEncoderModel.forward`, or labels of another shape than input_ids.
        """
        logits = self.output(self.encoded(input_ids, attention_mask, others))
        loss = None
        if labels is not None:
            check_labels(labels, logits.shape[:2])
            scores = logits.float().transpose(1, 2)
            losses = nn.functional.cross_entropy(scores, labels, ignore_index=NO_TARGET, reduction="none")
            loss = averaged(losses, labels, num_items_in_batch)
        output = TokenClassifierOutput(loss=loss, logits=logits)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()
