"""Evaluation counts every token once, and neither span nor batch size changes what it finds."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.covering import first_always
from polysketch.evaluation import Evaluation, evaluate
from polysketch.models import ModelConfig, TransformerLM

VOCAB = 50


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    """Two layers, one of which sees the whole window: a state that is not carried would show."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        attention=("softmax", "polysketch-paper"),
        attention_options=({}, {"local_chunk": 16, "sketch_size": 16}),
    )
    return TransformerLM(config)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """A few windows and a rest."""
    return np.random.default_rng(0).integers(0, VOCAB, size=331).astype(np.uint16)


def reference_losses(model: TransformerLM, tokens: np.ndarray, context_length: int) -> list[Tensor]:
    """Losses window by window, each from one forward over the whole window: the definition."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    windows = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, context_length):
            window = ids[start : start + context_length + 1]
            windows.append(functional.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none"))
    return windows


@pytest.mark.parametrize("context_length", first_always([7, 64, 100, 330, 1], 4))
def test_the_loss_is_the_mean_over_every_token_but_the_first(model, tokens, context_length):
    """Windows, carried state and the shorter last window together give the definition's loss."""
    batch_size = max(3, 60 // context_length)
    result = evaluate(model, tokens, context_length=context_length, span=24, batch_size=batch_size)
    expected = torch.cat(reference_losses(model, tokens, context_length))
    assert result.num_tokens == len(tokens) - 1 == len(expected)
    assert result.loss == pytest.approx(expected.mean().item(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected.mean().item()), rel=1e-5)


@pytest.mark.parametrize(("span", "batch_size"), first_always([(13, 2), (64, 5), (1000, 100), (1, 1)], 3, several=True))
def test_span_and_batch_size_do_not_change_the_result(model, tokens, span, batch_size):
    """They are for memory and speed alone, at every position."""
    expected = evaluate(model, tokens, context_length=60, span=60, batch_size=1)
    result = evaluate(model, tokens, context_length=60, span=span, batch_size=batch_size)
    np.testing.assert_allclose(result.loss_at_position, expected.loss_at_position, rtol=1e-4)
    np.testing.assert_array_equal(result.count_at_position, expected.count_at_position)


def test_loss_at_position_is_the_mean_over_windows_at_that_position(model, tokens):
    """Positions are counted from a window's first token."""
    result = evaluate(model, tokens, context_length=100, span=32)
    windows = reference_losses(model, tokens, 100)
    for position in (0, 29, 30, 99):
        at_position = [window[position].item() for window in windows if len(window) > position]
        assert result.count_at_position[position] == len(at_position)
        assert result.loss_at_position[position] == pytest.approx(np.mean(at_position), rel=1e-4)


def test_the_buckets_double_and_their_mean_is_the_loss(model, tokens):
    """Weighted by how many predictions they hold, the last bucket shorter."""
    result = evaluate(model, tokens, context_length=300)
    assert result.position_edges.tolist() == [0, 64, 128, 256, 300]
    weights = np.add.reduceat(result.count_at_position, result.position_edges[:-1])
    assert np.average(result.loss_by_position, weights=weights) == pytest.approx(result.loss, rel=1e-12)


def test_no_span_of_a_long_context_exceeds_the_asked_length(model, tokens, monkeypatch):
    """Bounded memory: whatever the context, the model sees `span` tokens of `batch_size` windows at a time."""
    shapes = []
    extend_hidden = TransformerLM.extend_hidden

    def recorded(self, ids, state, **options):
        shapes.append(tuple(ids.shape))
        return extend_hidden(self, ids, state, **options)

    monkeypatch.setattr(TransformerLM, "extend_hidden", recorded)
    evaluate(model, tokens, context_length=150, span=40, batch_size=2)
    assert shapes == [(2, 40), (2, 40), (2, 40), (2, 30), (1, 30)]


def test_bits_per_byte_divides_by_the_bytes_of_the_predicted_tokens(model, tokens):
    """Not by those of the first token, which is not predicted; an id of 0 bytes adds to the loss alone."""
    token_bytes = np.arange(VOCAB) % 5
    result = evaluate(model, tokens, context_length=64, token_bytes=token_bytes)
    assert result.num_bytes == token_bytes[tokens[1:]].sum()
    assert result.bits_per_byte == pytest.approx(result.loss * result.num_tokens / math.log(2) / result.num_bytes)


def test_without_byte_counts_there_are_no_bits_per_byte(model, tokens):
    """Nothing is guessed."""
    result = evaluate(model, tokens, context_length=64)
    assert result.bits_per_byte is None
    assert result.num_bytes is None


def test_max_tokens_predicts_the_first_tokens_only(model, tokens):
    """Exactly so many, as if the rest were not there."""
    result = evaluate(model, tokens, context_length=64, max_tokens=100)
    assert result.num_tokens == 100
    assert result.loss == pytest.approx(evaluate(model, tokens[:101], context_length=64).loss, rel=1e-6)


def test_progress_ends_at_the_total(model, tokens):
    """It counts predicted tokens."""
    calls = []
    evaluate(model, tokens, context_length=64, batch_size=2, on_progress=lambda *call: calls.append(call))
    assert calls == [(128, 330), (256, 330), (320, 330), (330, 330)]


def test_evaluating_leaves_the_model_as_it_was(model, tokens):
    """In training mode, without gradients."""
    model.train()
    evaluate(model, tokens, context_length=64)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


class UniformModel(nn.Module):
    """Knows nothing: every token is as likely as every other."""

    config = ModelConfig(vocab_size=VOCAB, num_layers=1, hidden_size=64, num_heads=1, attention="softmax")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def init_state(self, batch_size, *, device=None, dtype=None):
        return None

    def extend_hidden(self, ids, state, *, key_mask=None):
        return ids, state

    def token_losses(self, hidden, targets):
        return torch.full(targets.shape, math.log(VOCAB))


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(tokens):
    """A calibration of loss and perplexity that needs no network."""
    result = evaluate(UniformModel(), tokens, context_length=64, token_bytes=np.ones(VOCAB, dtype=np.int64))
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(math.log2(VOCAB), rel=1e-5)
    assert isinstance(result, Evaluation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 331}, "expected at least 332 tokens for a context of 331, found 331"),
        ({"context_length": 0}, "context_length of at least 1, found 0"),
        ({"span": 0}, "span of at least 1"),
        ({"batch_size": -1}, "batch_size of at least 1"),
        ({"max_tokens": 0}, "max_tokens of at least 1"),
        ({"token_bytes": np.ones(VOCAB + 1)}, "another tokenizer"),
        ({"token_bytes": np.ones(VOCAB - 10, dtype=np.int64)}, "expected token ids from 0 to 39"),
    ],
)
def test_bad_arguments_are_refused_by_name(tokens, changes, message):
    """Each with what was expected and what was found."""
    with pytest.raises(ValueError, match=message):
        evaluate(UniformModel(), tokens, **{"context_length": 64, **changes})


def test_an_id_outside_the_vocabulary_is_refused_before_the_embedding(tokens):
    """On a GPU it would end the process."""
    with pytest.raises(ValueError, match="expected token ids from 0 to 49, found 50: the data was probably prepared"):
        evaluate(UniformModel(), np.append(tokens, VOCAB), context_length=64)


def test_a_span_of_any_size_reads_a_window_at_once(model, tokens):
    """Also one that no tensor could have."""
    whole = evaluate(model, tokens, context_length=64, span=64)
    assert evaluate(model, tokens, context_length=64, span=10**20).loss == whole.loss


def test_what_forward_estimates_is_measured_and_not_what_decoding_knows(tokens):
    """Decoding with `hyper` is softmax; the losses of training, and its speed, are those of the estimate."""
    torch.manual_seed(0)
    options = {"min_length": 16, "chunk_size": 4, "sample_size": 4}
    config = ModelConfig(
        vocab_size=VOCAB, num_layers=2, hidden_size=32, num_heads=2, attention="hyper", attention_options=options
    )
    model = TransformerLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() == 2 else 1.0)
    expected = torch.cat(reference_losses(model, tokens, 128)).mean().item()
    exact = TransformerLM(dataclasses.replace(config, attention="softmax", attention_options={})).eval()
    exact.load_state_dict({name: x for name, x in model.state_dict().items() if "hyperplanes" not in name})
    for span in (32, 128, 4096):
        found = evaluate(model, tokens, context_length=128, span=span, batch_size=2).loss
        assert found == pytest.approx(expected, rel=1e-5)
    assert abs(expected - evaluate(exact, tokens, context_length=128).loss) > 1e-3
