"""Every context predicts the same tokens, and each loss is that of an evaluation at that context."""

import numpy as np
import pytest
import torch

from attention.covering import first_always
from polysketch.evaluation import evaluate, losses_by_context
from polysketch.models import ModelConfig, TransformerLM


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    """Two mechanisms, one of which sees everything."""
    torch.manual_seed(0)
    options = ({}, {"local_chunk": 16, "sketch_size": 16})
    return TransformerLM(
        ModelConfig(50, 2, 64, num_heads=2, attention=("softmax", "polysketch-paper"), attention_options=options)
    )


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Five windows of 64 and a rest."""
    return np.random.default_rng(0).integers(0, 50, size=5 * 64 + 30).astype(np.uint16)


def test_every_context_has_the_loss_of_an_evaluation_on_the_same_tokens(model, tokens):
    """A whole number of the longest windows, after half of one; contexts in ascending order, each once."""
    found = losses_by_context(model, tokens, [64, 16, 64, 24], token_bytes=np.ones(50, dtype=np.int64))
    assert found.contexts == [16, 24, 64]
    assert found.num_tokens == 256
    for context, loss, bits in zip(found.contexts, found.loss, found.bits_per_byte, strict=True):
        expected = evaluate(model, tokens[32 : 32 + 257], context_length=context)
        assert loss == pytest.approx(expected.loss, rel=1e-5)
        assert bits == pytest.approx(expected.loss / np.log(2), rel=1e-5)


@pytest.mark.parametrize("context", first_always([24, 2, 64], 2))
def test_the_late_loss_is_that_of_the_same_tokens_with_half_of_the_context_before_them(model, tokens, context):
    """Token by token: each from the window, of those shifted by half of one, that has it in its second half."""
    found = losses_by_context(model, tokens, [context, 64], max_tokens=140)
    assert found.num_tokens == 128
    ids, half = torch.from_numpy(tokens.astype(np.int64)), context // 2
    losses = []
    for target in range(33, 33 + 128):
        first = 32 + (target - 33) // half * half - half
        with torch.no_grad():
            logits = model(ids[None, first:target])[0, -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[target]).item())
    assert found.late_loss[0] == pytest.approx(np.mean(losses), rel=1e-5)


def test_progress_counts_the_tokens_of_all_contexts(model, tokens):
    """And ends with all."""
    seen = []
    losses_by_context(model, tokens, [32, 64], on_progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert seen[-1] == (2 * 2 * 256 + 16 + 32,) * 2


def test_too_few_tokens_or_no_context_are_refused(model, tokens):
    """By the numbers."""
    with pytest.raises(ValueError, match="at least 1501 tokens, of which 1000 to predict, for a context of 1000"):
        losses_by_context(model, tokens, [16, 1000])
    for contexts in ([], [15, 16], [0]):
        with pytest.raises(ValueError, match="even number of tokens"):
            losses_by_context(model, tokens, contexts)
