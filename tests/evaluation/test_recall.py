"""Recall accuracy counts labelled positions alone, and the whole vocabulary competes."""

import pytest
import torch
from torch import nn

from polysketch.evaluation import recall_accuracy
from polysketch.models import ModelConfig, TransformerLM

VOCAB = 20


class SuccessorModel(nn.Module):
    """Always predicts the id after the one it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def hidden_states(self, ids, *, key_mask=None):
        return nn.functional.one_hot(ids, VOCAB).float()

    def logits(self, hidden):
        return hidden.roll(1, dims=-1)


def test_accuracy_is_the_share_of_labelled_positions_answered_right():
    """Unlabelled positions count neither way; batches weigh as many queries as they hold."""
    first = torch.tensor([[1, 5, 9, 3]]), torch.tensor([[2, -100, 10, 7]])
    second = torch.tensor([[4, 4]]), torch.tensor([[-100, 0]])
    assert recall_accuracy(SuccessorModel(), [first]) == pytest.approx(2 / 3)
    assert recall_accuracy(SuccessorModel(), [first, second]) == pytest.approx(2 / 4)


def test_the_prediction_at_a_query_is_the_forward_of_the_whole_sequence():
    """The shortcut of computing logits at queries only changes nothing."""
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(VOCAB, num_layers=1, hidden_size=64, num_heads=1, attention="softmax"))
    ids = torch.randint(VOCAB, (3, 24))
    answers = model(ids).argmax(-1)
    labels = torch.where(torch.rand(3, 24) < 0.5, answers, torch.tensor(-100))
    assert recall_accuracy(model, [(ids, labels)]) == 1.0
    assert recall_accuracy(model, [(ids, torch.where(labels >= 0, (labels + 1) % VOCAB, labels))]) == 0.0


def test_without_any_label_there_is_no_accuracy():
    """A share of nothing is refused."""
    with pytest.raises(ValueError, match="found none"):
        recall_accuracy(SuccessorModel(), [(torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), -100))])


def test_labels_of_another_shape_are_refused():
    """Not broadcast."""
    with pytest.raises(ValueError, match="expected labels of shape"):
        recall_accuracy(
            SuccessorModel(), [(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))]
        )
