"""Knowledge distillation: the whole model learns to give the next-token distribution that it gave with softmax."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.integrations.language_model import HuggingFaceLM


class Distillation(nn.Module):
    """The divergence of a model from its teacher, as a loss to train on.

    KL(teacher || student) of the next token at temperature 1: stage 3 of MOHAWK (Bick et al., 2024) and step 2 of
    RADLADS (Goldstein et al., 2025).

    Args:
        model: the student, a transformers model; what of it requires gradients is trained.
        teacher: the model to agree with, see `frozen_copy`. Its vocabulary must be the student's.
        end_of_text: as for `HuggingFaceLM`.

    Attributes:
        student: the student; the only parameters of this module.

    Raises:
        TypeError, ValueError: as `HuggingFaceLM`; logits that are scaled or capped are refused.
    """

    def __init__(self, model: Any, teacher: Any, *, end_of_text: int | None = None) -> None:
        super().__init__()
        self.student = HuggingFaceLM(model, end_of_text=end_of_text)
        self._teacher = (
            HuggingFaceLM(teacher, end_of_text=end_of_text),
        )  # in a tuple, so that its weights are not this module's

    def loss(self, ids: Tensor) -> Tensor:
        """Mean divergence (nats) at ids[:, :-1], the tokens that fine-tuning would read; a scalar.

        The teacher keeps nothing for backward. Logits of student and teacher are made in chunks of tokens.
        """
        (teacher,), read = self._teacher, ids[:, :-1]
        with torch.no_grad():
            wanted = teacher.hidden_states(read)
        return self.student.token_divergences(self.student.hidden_states(read), teacher, wanted).mean()


def frozen_copy(model: Any) -> Any:
    """A copy of a model on its device, in evaluation mode, without gradients. It needs the memory of its weights."""
    return copy.deepcopy(model).eval().requires_grad_(False)
