"""Assisted decoding: guesses change how often the model is called, and never the text."""

from collections.abc import Sequence

import pytest
import torch

from attention.covering import pairs_always
from polysketch.generation import AssistantDrafts, PromptLookup, generate, generate_with_drafts
from polysketch.models import ModelConfig, TransformerLM

VOCAB = 40
KINDS = {
    "polysketch": {"sketch_size": 8, "window": 8},
    "polysketch-paper": {"sketch_size": 16, "local_chunk": 16},
    "softmax": {},
    "polysketch-heavy": {"sketch_size": 8},
}


def make_model(kind: str, seed: int = 1) -> TransformerLM:
    """A sharp distribution that depends on the whole prompt."""
    torch.manual_seed(seed)
    config = ModelConfig(
        VOCAB, num_layers=2, hidden_size=64, num_heads=2, attention=kind, attention_options=KINDS[kind]
    )
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.mul_(4).add_(0.05 * torch.randn_like(parameter))
    return model


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Scripted:
    """Guesses a known text up to a place that changes from call to call, and then a wrong token."""

    def __init__(self, text: list[int], rights: Sequence[int], num_tokens: int = 6) -> None:
        self.text, self.rights, self.num_tokens = text, rights, num_tokens

    def begin(self) -> None:
        self._calls = 0

    def draft(self, text, sampler, uniforms):
        right = self.rights[self._calls % len(self.rights)]
        self._calls += 1
        guess = self.text[len(text) : len(text) + self.num_tokens]
        return [token if place < right else (token + 1) % VOCAB for place, token in enumerate(guess)]


SETTINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "seed": 3},
    "top k": {"top_k": 5, "seed": 4},
    "top p": {"top_p": 0.7, "seed": 5},
    "penalty": {"temperature": 0, "repetition_penalty": 1.5},
}
RIGHTS = ((0,), (1,), (6,), (0, 2, 6, 3, 1, 0, 0, 5))
OF_SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(one, id=name, marks=[pytest.mark.full] * (name not in ("greedy", "drawn")))
        for name, one in SETTINGS.items()
    ],
)


@pytest.mark.parametrize(
    ("kind", "chosen", "rights"), pairs_always({"kind": tuple(KINDS), "chosen": tuple(SETTINGS), "rights": RIGHTS})
)
def test_the_text_is_that_of_generate_whatever_is_guessed(kind, chosen, rights):
    """Guesses that are wrong from any place on: the state goes back to where it was."""
    model, prompt, settings = make_model(kind), prompt_of(37, 1), SETTINGS[chosen]
    expected = generate(model, [prompt], max_new_tokens=20, **settings)
    drafter = Scripted(prompt + expected.tokens[0], rights)
    found = generate_with_drafts(model, prompt, drafter, max_new_tokens=20, **settings)
    assert found.tokens == expected.tokens
    assert len(set(found.tokens[0])) > 2
    assert expected.steps == 19
    if rights == (6,):
        assert found.steps == 3  # 19 tokens, 7 a call
    if rights == (0,):
        assert 19 <= found.steps <= 19 + 19 // 16 + 1  # tokens that wait are read for good now and then


@OF_SETTINGS
def test_a_model_that_is_its_own_assistant_guesses_every_token(settings):
    """Random numbers are shared: drawn guesses are as right as greedy ones."""
    model, prompt = make_model("polysketch"), prompt_of(20, 2)
    expected = generate(model, [prompt], max_new_tokens=25, **settings)
    found = generate_with_drafts(model, prompt, AssistantDrafts(model, 5), max_new_tokens=25, **settings)
    assert found.tokens == expected.tokens
    assert found.steps == 4


@OF_SETTINGS
def test_another_model_may_assist(settings):
    """One that is often wrong; twice with the same drafter."""
    model, assistant = make_model("polysketch"), AssistantDrafts(make_model("softmax", seed=2), 3)
    for prompt in (prompt_of(20, 2), prompt_of(3, 5)):
        expected = generate(model, [prompt], max_new_tokens=20, **settings)
        found = generate_with_drafts(model, prompt, assistant, max_new_tokens=20, **settings)
        assert found.tokens == expected.tokens


def test_lookup_guesses_what_followed_the_longest_match():
    """By the definition: the last place where the last tokens stood before."""
    numbers, sampler = torch.zeros(3, dtype=torch.float64), None
    lookup = PromptLookup(num_tokens=3, longest_match=2)
    text = [1, 2, 3, 4, 9, 2, 5, 6, 7, 1, 2]
    assert lookup.draft(text, sampler, numbers) == [3, 4, 9]  # after (1, 2), not after the later (2)
    assert lookup.draft([*text, 6], sampler, numbers) == [7, 1, 2]  # (2, 6) is new, 6 is not
    assert lookup.draft([*text, 6, 30], sampler, numbers) == []
    lookup.begin()
    assert lookup.draft([30, 30], sampler, numbers) == [30]


def test_a_text_that_repeats_itself_takes_few_calls():
    """A model that goes round in a circle, and a prompt with one round of it."""
    model = make_model("polysketch")
    with torch.no_grad():  # the next token is the one after, whatever came before
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.zero_()
        model.embedding.weight.copy_(torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(0)))
    step = model.logits
    model.logits = lambda hidden: step(hidden).roll(1, -1) * 10
    found = generate_with_drafts(model, [*range(VOCAB), 0], PromptLookup(10), max_new_tokens=90, temperature=0)
    assert found.tokens == [[(1 + place) % VOCAB for place in range(90)]]
    assert found.steps == 9


def test_a_text_ends_at_a_stop_id_a_limit_and_where_the_caller_says():
    """Also in the middle of a guess, of which nothing more is told."""
    model, prompt = make_model("polysketch"), prompt_of(37, 1)
    told = []
    for end in ({"stop": None}, {"on_token": lambda row, token: told.append(token) or len(told) == 9}):
        whole = generate(model, [prompt], max_new_tokens=25, seed=1).tokens[0]
        settings = {"stop": whole[11]} if "stop" in end else end
        expected = generate(model, [prompt], max_new_tokens=25, seed=1, **settings)
        told.clear()
        found = generate_with_drafts(
            model, prompt, Scripted(prompt + whole, [6]), max_new_tokens=25, seed=1, **settings
        )
        assert (found.tokens, found.stopped) == (expected.tokens, [True])
    assert told == found.tokens[0]
    assert len(told) == 9


def test_guesses_that_the_model_does_not_know_are_cut_off():
    """An assistant with a larger vocabulary, or a drafter with a fault."""
    model, prompt = make_model("polysketch"), prompt_of(9, 1)
    expected = generate(model, [prompt], max_new_tokens=10, temperature=0).tokens

    class Wild(Scripted):
        def draft(self, text, sampler, uniforms):
            return [self.text[len(text)], VOCAB, -1] * 5 if len(text) < len(self.text) else []

    found = generate_with_drafts(model, prompt, Wild(prompt + expected[0], [0]), max_new_tokens=10, temperature=0)
    assert found.tokens == expected


def test_bad_settings_are_named():
    model = make_model("polysketch")
    with pytest.raises(ValueError, match="at least one token in prompt 0"):
        generate_with_drafts(model, [], PromptLookup(), max_new_tokens=3)
    with pytest.raises(ValueError, match="num_tokens=0"):
        PromptLookup(0)
    with pytest.raises(ValueError, match="num_tokens of at least 1, found 0"):
        AssistantDrafts(model, 0)
