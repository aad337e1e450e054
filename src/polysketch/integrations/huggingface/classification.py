"""Classification of whole texts: a linear layer over the last token's hidden state."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from polysketch.integrations.huggingface.arguments import wants_dict
from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.huggingface.model import PolysketchModel
from polysketch.integrations.huggingface.packed import take_documents
from polysketch.integrations.huggingface.padding import refuse_empty_rows
from polysketch.integrations.huggingface.pretrained import PolysketchPreTrainedModel


class PolysketchForSequenceClassification(PolysketchPreTrainedModel):
    """scores = W h, h the hidden state of the last real token: the one that has seen the whole text.

    Args:
        config: sizes and mechanisms; `num_labels` and `problem_type` as everywhere in transformers.
    """

    accepts_loss_kwargs = False  # a mean over texts, which Trainer has to divide by its steps of accumulation

    def __init__(self, config: PolysketchConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PolysketchModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
        self._freeze_unused()

    def _freeze_unused(self) -> None:
        self.inner.output_bias.requires_grad_(False)  # there are no logits for it to change

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutputWithPast | tuple:
        """Scores of each text, and the loss.

        Args:
            input_ids: (batch, length) int64.
            attention_mask: (batch, length), nonzero for a real token; padding on the left or on the right. Without one
                every token is real.
            labels: (batch,) int64 classes, (batch,) floating for regression, (batch, num_labels) for several labels.
            return_dict: a named output rather than a tuple.
            others: as for `PolysketchModel.forward`, packed documents left out.

        Returns:
            `logits` (batch, num_labels), `loss` where there are labels, and `hidden_states` where asked for.

        Raises:
            ValueError: as `PolysketchModel.forward`, a row of padding alone, or documents packed into one row.
        """
        if input_ids is not None and take_documents(others, input_ids.shape, attention_mask, 0) is not None:
            raise ValueError("a row has one class: documents packed into one row cannot be classified")
        read = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
            return_dict=True,
            **others,
        )
        hidden = read.last_hidden_state
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        logits = self.score(hidden[rows, _last_real(hidden, attention_mask)])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=read.hidden_states)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()


def _last_real(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(batch,) index of each row's last real token."""
    if attention_mask is None:
        return torch.full(hidden.shape[:1], hidden.shape[1] - 1, device=hidden.device)
    real = attention_mask.bool().to(hidden.device)
    refuse_empty_rows(real)
    return hidden.shape[1] - 1 - real.int().flip(1).argmax(1)
