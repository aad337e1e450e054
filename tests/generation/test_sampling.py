"""Sampling: what top-k and top-p keep, and that draws have the distribution they claim."""

import math

import pytest
import torch

from polysketch.generation import Sampler, draw, keep_top_k, keep_top_p, penalize_repetition, tokens_seen
from polysketch.generation.randomness import PromptUniforms

PROBABILITIES = torch.tensor([[0.05, 0.4, 0.25, 0.3], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
LOGITS = PROBABILITIES.log() + 3.0


def kept(logits: torch.Tensor) -> list[list[int]]:
    """Indices that can still be drawn, row by row."""
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_top_k_keeps_the_k_largest_unchanged():
    """And nothing else."""
    result = keep_top_k(LOGITS, 2)
    assert kept(result)[0] == [1, 3]
    torch.testing.assert_close(result[0, [1, 3]], LOGITS[0, [1, 3]], rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_keeps_exactly_k_among_equal_logits(k):
    """Ties do not widen the choice."""
    assert len(kept(keep_top_k(torch.zeros(1, 9), k))[0]) == k


@pytest.mark.parametrize("k", [4, 5, 1000])
def test_top_k_of_the_vocabulary_or_more_keeps_all(k):
    """A small vocabulary is no error."""
    assert torch.equal(keep_top_k(LOGITS, k), LOGITS)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.01, [[1], [0]]),
        (0.39, [[1], [0]]),
        (0.41, [[1, 3], [0]]),
        (0.69, [[1, 3], [0]]),
        (0.71, [[1, 2, 3], [0, 1]]),
        (0.96, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (1.0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, expected):
    """The token that crosses p belongs to it; one token always remains; equal ones come in order of their ids."""
    assert kept(keep_top_p(LOGITS, p)) == expected


def test_draws_have_the_probabilities_of_the_softmax():
    """Over evenly spaced uniforms every token is drawn in proportion, to within one step."""
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    tokens = draw(LOGITS[:1].expand(10_000, 4), uniforms)
    shares = torch.bincount(tokens, minlength=4) / 10_000
    torch.testing.assert_close(shares.double(), PROBABILITIES[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
def test_no_uniform_draws_an_excluded_token(uniform):
    """Neither end of the interval does, where excluded tokens lie at both ends of the vocabulary."""
    logits = torch.tensor([[-math.inf, -math.inf, 1.9, 0.3, -math.inf]], dtype=torch.float64)
    assert draw(logits, torch.tensor([uniform], dtype=torch.float64)).item() in (2, 3)


def test_temperature_zero_is_the_most_probable_token_whatever_the_uniform():
    """Greedy decoding uses no randomness."""
    for uniform in (0.0, 0.99):
        uniforms = torch.full((2,), uniform, dtype=torch.float64)
        assert Sampler(temperature=0.0).choose(LOGITS, uniforms).tolist() == [1, 0]


def test_temperature_divides_the_logits():
    """At 1/2, probabilities are squared and renormalised."""
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    tokens = Sampler(temperature=0.5).choose(LOGITS[:1].expand(10_000, 4), uniforms)
    squares = PROBABILITIES[0].square()
    torch.testing.assert_close(
        (torch.bincount(tokens, minlength=4) / 10_000).double(), squares / squares.sum(), rtol=0, atol=2e-4
    )


def test_top_p_looks_at_what_top_k_left():
    """0.4 of 0.4 + 0.3 is 0.57: alone enough for p = 0.55, which of the whole distribution it would not be."""
    uniforms = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    logits = LOGITS[:1].expand(100, 4)
    assert set(Sampler(top_k=2, top_p=0.55).choose(logits, uniforms).tolist()) == {1}
    assert set(Sampler(top_p=0.55).choose(logits, uniforms).tolist()) == {1, 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_are_sampled_in_double(dtype):
    """A vocabulary of equal logits: the last tokens are as likely as the first."""
    logits = torch.zeros(1, 50_000, dtype=dtype)
    for uniform, token in ((0.0, 0), (0.5, 25_000), (1 - 2**-53, 49_999)):
        chosen = Sampler().choose(logits, torch.tensor([uniform], dtype=torch.float64))
        assert chosen.item() == pytest.approx(token, abs=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(temperature, bad):
    """Instead of a token drawn from nonsense."""
    logits = LOGITS.clone()
    logits[1, 2] = bad
    with pytest.raises(ValueError, match="expected finite logits"):
        Sampler(temperature=temperature).choose(logits, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_k": -3},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.2},
        {"repetition_penalty": 1e3},
        {"repetition_penalty": math.nan},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings):
    """When they are given, not when the first token is drawn."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampler(**settings)


def test_a_temperature_next_to_zero_is_greedy():
    """Where logits divided by it overflow."""
    uniforms = torch.full((len(LOGITS),), 0.5, dtype=torch.float64)
    chosen = Sampler(temperature=5e-324).choose(LOGITS, uniforms)
    assert torch.equal(chosen, Sampler(temperature=0).choose(LOGITS, uniforms))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_leads_no_logit_out_of_the_range_of_half_precision(temperature):
    logits = torch.tensor([[700.0, 3.0, 1.0]], dtype=torch.float16)
    sampler = Sampler(temperature=temperature, repetition_penalty=0.01)
    seen = torch.tensor([[True, False, False]])
    assert sampler.choose(logits, torch.tensor([0.5], dtype=torch.float64), seen).tolist() == [0]


def test_uniforms_are_drawn_on_the_cpu_whatever_the_default_device():
    expected = PromptUniforms([1, 2], 3).next()
    with torch.device("meta"):
        assert torch.equal(PromptUniforms([1, 2], 3).next(), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 20.0])
def test_the_penalty_of_repetition_is_that_of_transformers(penalty):
    """Logits of both signs, tokens that a text has twice, and rows of their own."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    texts = [[3, 0, 3, 7], [1, 2, 8, 8]]
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    found = penalize_repetition(logits, tokens_seen(texts, 9), penalty)
    expected = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(texts), logits)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[0, [1, 2, 4, 5, 6, 8]], logits[0, [1, 2, 4, 5, 6, 8]])


def test_a_token_that_was_seen_loses_its_lead():
    """Greedy too: 0.4 against 0.3, at a penalty that crosses them; and what was not seen is needed to know."""
    sampler = Sampler(temperature=0, repetition_penalty=1.2)
    uniforms = torch.zeros(2, dtype=torch.float64)
    assert sampler.choose(LOGITS, uniforms, tokens_seen([[], []], 4)).tolist() == [1, 0]
    assert sampler.choose(LOGITS, uniforms, tokens_seen([[1], [3]], 4)).tolist() == [3, 0]
    with pytest.raises(ValueError, match="expected `seen`"):
        sampler.choose(LOGITS, uniforms)


@pytest.mark.parametrize(
    "settings", [{"temperature": "1"}, {"top_k": 2.5}, {"top_k": True}, {"top_p": "0.5"}, {"repetition_penalty": [1.2]}]
)
def test_settings_of_another_type_are_refused_by_name(settings):
    with pytest.raises(TypeError, match=f"{next(iter(settings))}: expected a .*number, found"):
        Sampler(**settings)
