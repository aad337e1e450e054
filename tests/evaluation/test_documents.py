"""Documents evaluated each by itself: what each costs alone, cut at the context or read whole."""

import numpy as np
import pytest
import torch

from polysketch.evaluation import evaluate
from polysketch.models import ModelConfig, TransformerLM

END, CONTEXT = 0, 8
LENGTHS = [21, 1, 5, 9, 3, 30, 2]


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    torch.manual_seed(0)
    options = {"window": 4, "sketch_size": 4, "far_bias": 0.0}
    sizes = {"vocab_size": 23, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    return TransformerLM(ModelConfig(**sizes, attention="polysketch", attention_options=options)).double()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    found = np.random.default_rng(0).integers(1, 23, sum(LENGTHS))
    found[np.cumsum(LENGTHS) - 1] = END
    return found


def losses_apart(model, tokens, longest: int) -> dict[int, list[float]]:
    """By position, of each document cut into pieces of `longest` tokens, each read alone."""
    found: dict[int, list[float]] = {}
    for stop, length in zip(np.cumsum(LENGTHS), LENGTHS, strict=True):
        document = torch.from_numpy(tokens[stop - length : stop])[None]
        for start in range(0, length - 1, longest):
            piece = document[:, start : start + longest + 1]
            with torch.no_grad():
                losses = model.token_losses(model.hidden_states(piece[:, :-1]), piece[:, 1:].contiguous())[0]
            for position, loss in enumerate(losses.tolist()):
                found.setdefault(position, []).append(loss)
    return found


def check(result, expected: dict[int, list[float]]) -> None:
    every = [loss for losses in expected.values() for loss in losses]
    assert result.num_tokens == len(every) == sum(length - 1 for length in LENGTHS)
    assert result.loss == pytest.approx(np.mean(every), rel=1e-6)
    assert result.count_at_position.tolist() == [len(expected[position]) for position in range(len(expected))]
    means = [np.mean(expected[position]) for position in range(len(expected))]
    np.testing.assert_allclose(result.loss_at_position, means, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_documents_apart_cost_what_each_piece_costs_alone(model, tokens, batch_size):
    found = evaluate(model, tokens, context_length=CONTEXT, batch_size=batch_size, end_of_text=END)
    check(found, losses_apart(model, tokens, CONTEXT))


@pytest.mark.parametrize("span", [1, 7, 16, 1000])
def test_whole_documents_cost_what_each_costs_in_one_pass(model, tokens, span):
    found = evaluate(model, tokens, context_length=span, end_of_text=END, carry=True)
    check(found, losses_apart(model, tokens, max(LENGTHS)))
    assert len(found.loss_at_position) == max(LENGTHS) - 1


def test_what_stands_before_matters(model, tokens):
    """The three ways to read give three figures."""
    apart = evaluate(model, tokens, context_length=CONTEXT, end_of_text=END).loss
    whole = evaluate(model, tokens, context_length=CONTEXT, end_of_text=END, carry=True).loss
    windows = evaluate(model, tokens, context_length=CONTEXT).loss
    assert min(abs(apart - whole), abs(apart - windows), abs(whole - windows)) > 1e-4


def test_bytes_are_those_of_the_predicted_tokens(model, tokens):
    token_bytes = np.arange(23)
    found = evaluate(model, tokens, context_length=CONTEXT, end_of_text=END, token_bytes=token_bytes)
    starts = np.cumsum([0, *LENGTHS[:-1]])
    assert found.num_bytes == tokens.sum() - tokens[starts].sum()


class Sharing:
    """One of two processes; keeps what each adds."""

    count = 2

    def __init__(self, rank: int, kept: list) -> None:
        self.rank, self._kept = rank, kept

    def add_up(self, tensor):
        self._kept.append(tensor)
        return sum(self._kept)


def test_processes_share_rows_of_documents(model, tokens):
    kept: list = []
    for rank in range(2):
        given = {"context_length": CONTEXT, "batch_size": 2, "end_of_text": END}
        found = evaluate(model, tokens, **given, sharing=Sharing(rank, kept))
    check(found, losses_apart(model, tokens, CONTEXT))
    assert len({float(each.sum()) for each in kept}) == 2


def test_a_text_in_which_nothing_can_be_predicted_is_refused(model):
    with pytest.raises(ValueError, match="expected a document of at least 2 tokens"):
        evaluate(model, np.zeros(9, dtype=np.int64), context_length=CONTEXT, end_of_text=END)


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("place", [2, -1])
def test_ids_that_are_no_tokens_are_refused(model, tokens, carry, place):
    """Inside a document, and as the last token, which is only predicted."""
    wrong = tokens.copy()
    wrong[place] = 23
    with pytest.raises(ValueError, match="expected token ids from 0 to 22, found 23"):
        evaluate(model, wrong, context_length=CONTEXT, end_of_text=END, carry=carry)
    with pytest.raises(ValueError, match="expected token ids from 0 to 21, found 22"):
        evaluate(
            model,
            np.where(wrong == 23, 22, wrong),
            context_length=CONTEXT,
            end_of_text=END,
            carry=carry,
            token_bytes=np.ones(22, dtype=np.int64),
        )
