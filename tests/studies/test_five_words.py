"""Five hidden words: the text tells them, the control does not, and who copies finds them all."""

import numpy as np
import pytest
import torch

from evaluation.copying import CopyingModel
from polysketch.data.tokenization import BytesTokenizer
from polysketch.evaluation.needle import VALUES
from polysketch.models import ModelConfig, TransformerLM
from polysketch.studies.five_words import CONTROL, QUESTION, ask, asked_at_depths, context, draw_needle

TEXT = np.frombuffer(b"The old ship left the harbour at night and nobody saw who stood at the wheel. " * 9, np.uint8)
ENCODE = BytesTokenizer().encode
NEEDLES = [draw_needle(ENCODE, np.random.default_rng(seed)) for seed in range(6)]


def text_of(tokens) -> str:
    return bytes(list(tokens)).decode()


def test_five_different_words_are_drawn_and_none_more_often_than_others():
    generator = np.random.default_rng(0)
    words = [text_of(word) for _ in range(200) for word in draw_needle(ENCODE, generator).words]
    assert {word[1:] for word in words} == set(VALUES)
    assert all(len(set(words[first : first + 5])) == 5 for first in range(0, 1000, 5))
    assert text_of(NEEDLES[0].sentence) == f"{QUESTION}{text_of(NEEDLES[0].answer)}.\n\n"


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_context_tells_the_answer_at_its_depth_and_the_control_does_not(depth):
    found = text_of(context(TEXT, NEEDLES[0], depth, 300))
    control = text_of(context(TEXT, NEEDLES[0], None, 300))
    assert len(found) == len(control) == 300
    sentence = text_of(NEEDLES[0].sentence)
    room = 300 - len(sentence) - len(QUESTION)
    assert found.index(sentence) == round(depth * room)
    rest = found.replace(sentence, "")
    assert control.endswith(rest)
    assert text_of(TEXT).endswith(rest.removesuffix(QUESTION))
    assert control == text_of(TEXT)[len(QUESTION) - 300 :] + QUESTION
    assert not any(text_of(word) in control for word in NEEDLES[0].words)


def test_who_copies_finds_every_word_and_does_not_without_the_needle():
    found = ask(CopyingModel(257, reach=7), [context(TEXT, one, 0.3, 400) for one in NEEDLES], NEEDLES, 4)
    assert found.words == found.needles == 1
    assert found.loss < 0.02
    control = ask(CopyingModel(257, reach=7), [context(TEXT, one, None, 400) for one in NEEDLES], NEEDLES, 4)
    assert control.words == control.needles == 0
    assert control.loss > 5


def test_a_word_counts_when_all_of_its_tokens_are_named():
    class Forgetful(CopyingModel):
        """Names nothing that follows the second letter of a word of the answer, but of the first word all."""

        def _followed(self, seen):
            forgotten = len(seen) > 408 and seen[-3] == ord(" ")
            return None if forgotten else super()._followed(seen)

    contexts = [context(TEXT, one, 0.3, 400) for one in NEEDLES]
    found = ask(Forgetful(257, reach=7), contexts, NEEDLES, 6)
    assert found.words == pytest.approx(1 / 5)
    assert found.needles == 0


def test_losses_are_those_of_the_whole_read_at_once_whatever_the_batch():
    torch.manual_seed(0)
    options = {"window": 16, "sketch_size": 16}
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 1}
    model = TransformerLM(ModelConfig(257, **sizes, attention="polysketch", attention_options=options)).eval()
    contexts = [context(TEXT, one, 0.2, 300) for one in NEEDLES]
    expected = []
    for ids, one in zip(contexts, NEEDLES, strict=True):
        whole = torch.from_numpy(np.concatenate([ids, one.answer]))[None]
        with torch.no_grad():
            losses = model.token_losses(model.hidden_states(whole[:, :-1]), whole[:, 1:])
        expected += losses[0, -len(one.answer) :].tolist()
    for batch_size in (1, 4):
        assert ask(model, contexts, NEEDLES, batch_size).loss == pytest.approx(np.mean(expected), abs=1e-4)


def test_a_tokenizer_that_joins_words_and_a_length_without_room_are_refused():
    with pytest.raises(ValueError, match="found one that joins words"):
        draw_needle(lambda text: [len(text)], np.random.default_rng(0))
    with pytest.raises(ValueError, match="holds the needle and the question, found 60"):
        context(TEXT, NEEDLES[0], 0.0, 60)


def test_at_every_depth_the_same_words_are_hidden_in_the_same_texts(prepared):
    found = asked_at_depths(CopyingModel(257, reach=7), prepared, 400, (0.0, 0.5), 3)
    assert list(found) == [CONTROL, "0", "0.5"]
    assert found[CONTROL]["words"] == 0
    assert found["0"]["words"] == found["0.5"]["words"] == 1
    assert asked_at_depths(CopyingModel(257), prepared, 0, (0.5,), 3) == {}
    with pytest.raises(ValueError, match="expected at least 100000 tokens of test text"):
        asked_at_depths(CopyingModel(257), prepared, 100_000, (0.5,), 3)
