"""A needle is found by who copies, at any depth; by who sees one chunk, there alone; by who guesses, by chance."""

import dataclasses

import numpy as np
import pytest
import torch

from evaluation.copying import CopyingModel
from polysketch.data.tokenization import TOKENIZERS, BpeTokenizer, BytesTokenizer
from polysketch.evaluation import make_needles, needle_retrieval
from polysketch.models import ModelConfig, TransformerLM

WORDS = "The old ship left the harbour at night and nobody saw who stood at the wheel. "


@pytest.fixture(scope="module")
def haystack() -> np.ndarray:
    """Bytes of text that has nothing to do with any needle."""
    return np.frombuffer((WORDS * 30).encode(), dtype=np.uint8).astype(np.uint16)


@pytest.fixture(scope="module")
def needles():
    """The needles in bytes."""
    return make_needles(BytesTokenizer().encode)


def test_a_model_that_copies_finds_every_needle(haystack, needles):
    """At every length and depth, and the answer is its most probable token of all."""
    found = needle_retrieval(
        CopyingModel(257), haystack, needles, lengths=[150, 400], depths=[0.0, 0.3, 1.0], num_trials=8
    )
    np.testing.assert_array_equal(found.accuracy, np.ones((2, 3)))
    np.testing.assert_array_equal(found.exact, np.ones((2, 3)))
    assert found.chance == 1 / 8
    assert (found.margin > 5).all()


def test_a_model_of_one_chunk_finds_what_is_in_its_chunk_alone(haystack, needles):
    """The question is in the last of three chunks; at depth 1 the needle stands right before it."""
    local = CopyingModel(257, chunk=128)
    found = needle_retrieval(local, haystack, needles, lengths=[384], depths=[0.0, 0.5, 1.0], num_trials=8)
    np.testing.assert_array_equal(found.accuracy, [[0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(found.margin[0, :2], [0.0, 0.0])


def test_attention_of_one_chunk_does_not_know_which_value_was_hidden(haystack, needles):
    """A transformer of local attention beyond its chunk: no better than chance, values being hidden equally often."""
    torch.manual_seed(0)
    config = ModelConfig(
        257, num_layers=1, hidden_size=64, num_heads=1, attention="local", attention_options={"local_chunk": 64}
    )
    found = needle_retrieval(TransformerLM(config), haystack, needles, lengths=[320], depths=[0.0], num_trials=32)
    assert abs(found.accuracy.item() - found.chance) < 0.2
    assert abs(found.margin.item()) < 0.1


def test_a_liking_for_one_word_is_no_retrieval(haystack, needles):
    """What the model gives a value in any text is taken off: a strong prior does not hide what was found."""

    class Fond(CopyingModel):
        def logits(self, hidden):
            liked = torch.zeros(self.config.vocab_size)
            liked[needles[0].answers[0]] = 100.0
            return hidden + liked

    found = needle_retrieval(Fond(257), haystack, needles, lengths=[200], depths=[0.5], num_trials=16)
    assert found.accuracy.item() == 1.0
    assert found.exact.item() == pytest.approx(2 / 16)


def test_span_and_batch_size_change_nothing(haystack, needles):
    """They are for memory alone."""
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="softmax"))
    settings = {"lengths": [150, 200], "depths": [0.0, 0.7], "num_trials": 6}
    one = needle_retrieval(model, haystack, needles, batch_size=6, span=2048, **settings)
    other = needle_retrieval(model, haystack, needles, batch_size=4, span=37, **settings)
    np.testing.assert_array_equal(one.accuracy, other.accuracy)
    np.testing.assert_allclose(one.margin, other.margin, atol=1e-4)


def test_the_question_has_the_ids_it_has_in_the_hidden_sentence():
    """With every tokenizer; the first differing token is the answer."""
    trained = BpeTokenizer.train([WORDS, "The secret word of Anna is golden."] * 4, 320)
    for tokenizer in (TOKENIZERS["bytes"](), trained):
        for needle in make_needles(tokenizer.encode, num_values=8):
            assert len(set(needle.answers)) == 8
            for answer, statement in zip(needle.answers, needle.statements, strict=True):
                assert statement[: len(needle.question) + 1] == [*needle.question, answer]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [20]}, "lengths of at least"),
        ({"lengths": [100_000]}, "a text of at least 100000 tokens"),
        ({"depths": [0.5, 1.5]}, "depths from 0"),
        ({"num_trials": 0}, "at least one"),
    ],
)
def test_what_cannot_be_measured_is_refused(haystack, needles, change, message):
    """With what was expected."""
    settings = {"lengths": [200], "depths": [0.5], "num_trials": 2} | change
    with pytest.raises(ValueError, match=message):
        needle_retrieval(CopyingModel(257), haystack, needles, **settings)


def test_a_tokenizer_that_cannot_tell_values_apart_is_refused():
    """All words being one unknown token."""
    with pytest.raises(ValueError, match="apart by one token"):
        make_needles(lambda text: [len(word) for word in text.split(" ")], num_values=8)


def test_what_forward_estimates_is_asked_and_not_what_decoding_knows(haystack, needles):
    """Decoding with `hyper` is softmax, and would find what the estimate misses."""
    torch.manual_seed(0)
    config = ModelConfig(
        257,
        num_layers=1,
        hidden_size=64,
        num_heads=1,
        attention="hyper",
        attention_options={"min_length": 16, "chunk_size": 8, "sample_size": 8},
    )
    model = TransformerLM(config)
    exact = TransformerLM(dataclasses.replace(config, attention="softmax", attention_options={}))
    exact.load_state_dict({name: x for name, x in model.state_dict().items() if "hyperplanes" not in name})
    settings = {"lengths": [200], "depths": [0.5], "num_trials": 6}
    found, spans, softmax = (
        needle_retrieval(each, haystack, needles, span=span, **settings).margin.item()
        for each, span in ((model, 2048), (model, 37), (exact, 2048))
    )
    assert found == spans
    assert abs(found - softmax) > 1e-4
