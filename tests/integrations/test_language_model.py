"""A model of transformers in the interface of ours: the same loss, its own mode, a word where it cannot be."""

import numpy as np
import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from polysketch.evaluation import evaluate
from polysketch.integrations.language_model import HuggingFaceLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))


def test_the_loss_is_that_of_transformers(llama, ids):
    expected = llama(ids, labels=ids).loss
    torch.testing.assert_close(HuggingFaceLM(llama).loss(ids), expected)
    assert expected > 4.5  # not the entropy of a silent model


def test_evaluation_in_spans_is_evaluation_at_once_and_leaves_the_mode(llama, ids):
    tokens = np.asarray(ids.flatten())
    whole = evaluate(HuggingFaceLM(llama), tokens, context_length=60, span=60)
    parts = evaluate(HuggingFaceLM(llama), tokens, context_length=60, span=7)
    np.testing.assert_allclose(parts.loss_at_position, whole.loss_at_position, rtol=1e-4)
    assert not llama.training
    llama.train()
    evaluate(HuggingFaceLM(llama), tokens, context_length=60)
    assert llama.training


def test_logits_that_are_scaled_are_refused():
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0))
    with pytest.raises(ValueError, match="GraniteForCausalLM: it scales, caps or transforms"):
        HuggingFaceLM(model)


def test_a_model_without_an_output_layer_is_refused(llama):
    with pytest.raises(TypeError, match="LlamaModel, without an output layer"):
        HuggingFaceLM(llama.model)


def test_a_state_of_another_kind_is_refused(ids):
    """Without a state such a model is read as any other."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)
    model = MambaForCausalLM(config).eval()
    mamba = HuggingFaceLM(model)
    torch.testing.assert_close(mamba.loss(ids), model(ids, labels=ids).loss)
    with pytest.raises(TypeError, match="past_key_values, found MambaForCausalLM, whose state is of another kind"):
        mamba.init_state(2)
