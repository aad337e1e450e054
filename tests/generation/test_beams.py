"""Beam search: the most probable texts, by transformers' rules, whatever else is in the batch."""

import itertools

import pytest
import torch

from polysketch.generation import beam_search, generate
from polysketch.models import ModelConfig, TransformerLM

VOCAB = 40
STOP = 7


def make_model(vocab_size: int = VOCAB) -> TransformerLM:
    """A distribution that depends on the whole prompt, in which one token, the stop, comes up now and then."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=vocab_size,
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        attention=("polysketch", "polysketch-paper"),
        attention_options=({"sketch_size": 8, "window": 8}, {"local_chunk": 16, "sketch_size": 16}),
    )
    model = TransformerLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.05 * torch.randn_like(parameter))
        model.output_bias[STOP] += 3.0
    return model


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return make_model()


def prompt_of(length: int, seed: int) -> list[int]:
    """Random token ids without the stop."""
    ids = torch.randint(VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed))
    return (ids + (ids >= STOP)).tolist()


PROMPTS = [prompt_of(1, 0), prompt_of(37, 1), prompt_of(16, 2), prompt_of(5, 3)]


@torch.no_grad()
def log_probability(model: TransformerLM, prompt: list[int], tokens: list[int]) -> float:
    """Of the tokens after the prompt, by one forward pass."""
    logits = model(torch.tensor([prompt + tokens]))[0].double().log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return float(logits[places, torch.tensor(tokens)].sum())


SETTINGS = ({}, {"length_penalty": 0.0}, {"length_penalty": -1.5}, {"length_penalty": 3.0}, {"early_stopping": True})


@pytest.mark.parametrize(
    ("settings", "num_beams"),
    [
        pytest.param(settings, beams, marks=[pytest.mark.full] * (beams != 3 if settings else beams == 8))
        for settings in SETTINGS
        for beams in (1, 3, 8)
    ],
)
def test_the_beams_are_those_of_transformers(model, num_beams, settings):
    """Tokens, their order and their scores, of texts of which some end at a stop id and some at the limit."""
    hf = pytest.importorskip("polysketch.integrations.huggingface", reason="the extra hf is not installed")
    wrapped = hf.PolysketchForCausalLM.from_transformer(model).eval()
    found = beam_search(model, PROMPTS, max_new_tokens=20, num_beams=num_beams, stop=STOP, span=7, **settings).beams
    ends = []
    for prompt, beams in zip(PROMPTS, found, strict=True):
        expected = wrapped.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            eos_token_id=STOP,
            pad_token_id=STOP,
            return_dict_in_generate=True,
            output_scores=True,
            **(settings if num_beams > 1 else {}),
        )
        new = [row[len(prompt) :].tolist() for row in expected.sequences]
        assert [beam.tokens for beam in beams] == [[token for token in row if token != STOP] for row in new]
        assert [beam.stopped for beam in beams] == [STOP in row for row in new]
        ends += [beam.stopped for beam in beams]
        if num_beams > 1:
            assert [beam.score for beam in beams] == pytest.approx(expected.sequences_scores.tolist(), rel=2e-6)
    longest_win = settings.get("length_penalty", 0) > 1
    assert num_beams == 1 or longest_win or True in ends


def test_a_score_is_the_log_probability_by_the_definition(model):
    """One pass over the text gives it: the states followed their beams."""
    for prompt, beams in zip(
        PROMPTS, beam_search(model, PROMPTS, max_new_tokens=20, num_beams=5, stop=STOP).beams, strict=True
    ):
        assert len(beams) == 5
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        for beam in beams:
            text = beam.tokens + [STOP] * beam.stopped
            assert beam.score == pytest.approx(log_probability(model, prompt, text) / len(text), abs=1e-4)


def test_enough_beams_find_the_most_probable_text_of_all():
    """With as many beams as there are texts, the search is exhaustive."""
    small = make_model(8)
    prompt = [1, 2, 3, 4, 5]
    texts = {text: log_probability(small, prompt, list(text)) for text in itertools.product(range(8), repeat=2)}
    best = sorted(texts, key=texts.__getitem__, reverse=True)
    found = beam_search(small, [prompt], max_new_tokens=2, num_beams=64).beams[0]
    assert [tuple(beam.tokens) for beam in found[:20]] == best[:20]


def test_one_beam_is_greedy(model):
    found = beam_search(model, PROMPTS, max_new_tokens=15, num_beams=1).beams
    assert [beams[0].tokens for beams in found] == generate(model, PROMPTS, max_new_tokens=15, temperature=0).tokens


def test_the_other_prompts_do_not_matter(model):
    """Nor does one that ended before."""
    together = beam_search(model, PROMPTS, max_new_tokens=12, stop=STOP).beams
    for prompt, beams in zip(PROMPTS, together, strict=True):
        alone = beam_search(model, [prompt], max_new_tokens=12, stop=STOP).beams[0]
        assert [beam.tokens for beam in alone] == [beam.tokens for beam in beams]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 0}, "num_beams of at least 1, found 0"),
        ({"num_beams": 2_000_000_000}, "num_beams of at most .*, found 2000000000"),
        ({"length_penalty": float("nan")}, "length_penalty from -20 to 20, found nan"),
        ({"length_penalty": -5000.0}, "length_penalty from -20 to 20, found -5000"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"prompts": [[]]}, "at least one token in prompt 0"),
    ],
)
def test_bad_settings_are_named(model, settings, named):
    with pytest.raises(ValueError, match=named):
        beam_search(model, **{"prompts": PROMPTS, "max_new_tokens": 3, **settings})


@pytest.mark.parametrize("settings", [{"max_new_tokens": 2.5}, {"span": True}, {"early_stopping": "never"}])
def test_settings_of_another_kind_are_named(model, settings):
    """A length that no count of tokens meets would never end."""
    with pytest.raises(TypeError, match=f"{next(iter(settings))}: expected"):
        beam_search(model, **{"prompts": PROMPTS, "max_new_tokens": 3, **settings})


def test_damaged_weights_are_named():
    broken = make_model()
    with torch.no_grad():
        broken.output_bias[3] = float("nan")
    with pytest.raises(ValueError, match="finite logits"):
        beam_search(broken, PROMPTS, max_new_tokens=3)
