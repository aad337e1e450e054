"""Losses at growing contexts: the same tokens at every length, with what stands before them and nothing else."""

import numpy as np
import pytest
import torch

from polysketch.models import ModelConfig, TransformerLM
from polysketch.studies import lengths
from polysketch.studies.lengths import at_lengths, losses_at, stretch_ends

WINDOW, LAYERS = 8, 2
REACH = LAYERS * (WINDOW - 1) + 1  # tokens that a prediction depends on


def model(attention: str, vocab_size: int = 50, **options) -> TransformerLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocab_size,
        "num_layers": LAYERS,
        "hidden_size": 64,
        "num_heads": 1,
        "input_positions": False,
    }
    return TransformerLM(ModelConfig(**sizes, attention=attention, attention_options=options)).eval()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50, 400).astype(np.uint16)


def test_what_a_window_cannot_see_changes_nothing_and_softmax_sees_it(tokens):
    predicted, ends = 10, stretch_ends(len(tokens), [25, 100], 10, 4)
    windowed, everywhere = model("sliding-window", window=WINDOW), model("softmax")
    shortest = REACH + predicted - 1
    window = [losses_at(windowed, tokens, ends, length, predicted) for length in (shortest, 60, 100)]
    np.testing.assert_allclose(window[1], window[0], atol=1e-5)
    np.testing.assert_allclose(window[2], window[0], atol=1e-5)
    cut_short = losses_at(windowed, tokens, ends, shortest - 1, predicted)
    assert (abs(cut_short - window[0])[:, 0] > 3e-5).all()  # one token of many, two layers back
    np.testing.assert_allclose(cut_short[:, 1:], window[0][:, 1:], atol=1e-5)
    softmax = [losses_at(everywhere, tokens, ends, length, predicted) for length in (60, 100)]
    assert (abs(softmax[0] - softmax[1]) > 1e-5).mean() > 0.9


def test_losses_are_those_of_the_whole_context_read_at_once(tokens, monkeypatch):
    monkeypatch.setattr(lengths, "_SPAN", 7)
    polysketch = model("polysketch", window=WINDOW, sketch_size=16)
    ids = torch.from_numpy(tokens[300 - 90 : 301].astype(np.int64))[None]
    with torch.no_grad():
        expected = polysketch.token_losses(polysketch.hidden_states(ids[:, :-1]), ids[:, 1:])[0, -12:]
    np.testing.assert_allclose(losses_at(polysketch, tokens, [300], 90, 12)[0], expected.numpy(), atol=1e-4)


def test_predicted_tokens_of_stretches_do_not_overlap_and_the_longest_context_fits():
    for stretches in (1, 3, 50):
        ends = stretch_ends(1000, [64, 600], 64, stretches)
        assert ends[0] == 600
        assert len(ends) == min(stretches, 1 + 399 // 64)
        assert stretches == 1 or (ends[-1] == 999 and min(np.diff(ends)) >= 64)
    assert stretch_ends(601, [600], 64, 9) == [600]
    with pytest.raises(ValueError, match="expected more than 600 tokens of test text, found 600"):
        stretch_ends(600, [600], 64, 9)
    with pytest.raises(ValueError, match="at least the 64 predicted tokens, found 63"):
        stretch_ends(1000, [63, 600], 64, 9)


def test_after_an_interruption_lengths_that_were_measured_are_kept(prepared, tmp_path, monkeypatch):
    made = []

    def interrupted(model, tokens, ends, length, predicted):
        made.append(length)
        if made == [16, 48]:
            raise KeyboardInterrupt
        return losses_at(model, tokens, ends, length, predicted)

    monkeypatch.setattr(lengths, "losses_at", interrupted)
    arguments = (model("softmax", vocab_size=257), prepared, (48, 16), 16, 4, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        at_lengths(*arguments)
    found = at_lengths(*arguments)
    assert made == [16, 48, 48]
    assert list(found) == ["16", "48"]
    assert found["16"]["settings"]["ends"] == found["48"]["settings"]["ends"]
    assert all(len(one["by_stretch"]) == 4 and one["provenance"]["commit"] for one in found.values())
    assert found["16"]["loss"] != found["48"]["loss"]
