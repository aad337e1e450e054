"""`output_hidden_states` gives what stands between blocks, by every way through the model."""

import pytest
import torch

from integrations.huggingface.counting import VOCABULARY, counting
from polysketch.integrations.huggingface import (
    PolysketchConfig,
    PolysketchEncoderConfig,
    PolysketchEncoderModel,
    PolysketchForCausalLM,
    PolysketchForSequenceClassification,
)

LENGTH, LAYERS = 23, 3


@pytest.fixture
def model() -> PolysketchForCausalLM:
    torch.manual_seed(0)
    options = {"attention": "polysketch", "attention_options": {"window": 7, "sketch_size": 4}}
    config = PolysketchConfig(
        vocab_size=VOCABULARY, num_layers=LAYERS, hidden_size=32, num_heads=2, input_positions=True, **options
    )
    return PolysketchForCausalLM(config).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return counting(2, LENGTH, torch.Generator().manual_seed(0))


def test_each_is_what_the_blocks_before_it_give(model, ids):
    """From the embedded tokens to the final norm; logits are made of the last."""
    output = model(ids, output_hidden_states=True)
    inner = model.inner
    hidden, rotation = inner.begin_span(ids, 0)
    assert len(output.hidden_states) == LAYERS + 1
    for found, block in zip(output.hidden_states, inner.blocks, strict=False):
        torch.testing.assert_close(found, hidden, rtol=0, atol=1e-6)
        hidden = block(hidden, rotation)
    torch.testing.assert_close(output.hidden_states[-1], inner.final_norm(hidden), rtol=0, atol=1e-6)
    torch.testing.assert_close(output.logits, inner.logits(output.hidden_states[-1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("split", [1, 8, LENGTH - 1])
def test_a_cache_gives_those_of_the_whole(model, ids, split):
    """Of new tokens alone, also where the cache reads earlier ones together with them."""
    whole = model(ids, output_hidden_states=True).hidden_states
    first = model(ids[:, :split], output_hidden_states=True)
    then = model(ids[:, split:], past_key_values=first.past_key_values, output_hidden_states=True)
    for expected, *parts in zip(whole, first.hidden_states, then.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-5)


def test_generate_gives_them_for_each_token(model, ids):
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, **options)
    whole = model(found.sequences[:, :-1], output_hidden_states=True).hidden_states
    for layer, expected in enumerate(whole):
        parts = [step[layer] for step in found.hidden_states]
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-5)


def test_gradients_pass_through_them_with_recomputation_too(model, ids):
    """The same gradients whether blocks are computed again or not."""
    found = []
    for recompute in (False, True):
        model.zero_grad()
        model.train()
        (model.gradient_checkpointing_enable if recompute else model.gradient_checkpointing_disable)()
        states = model(ids, output_hidden_states=True).hidden_states
        sum(state.square().mean() for state in states).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) > LAYERS
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_configuration_that_asks_is_heard_and_an_argument_overrides_it(model, ids):
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == LAYERS + 1
    assert model(ids, output_hidden_states=False).hidden_states is None


def test_nothing_stays_behind(model, ids):
    """No hook, also after an error."""
    model(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="ids must lie in"):
        model(ids + VOCABULARY, output_hidden_states=True)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_encoders_and_classifiers_give_them_too(ids):
    """The last of an encoder is what it gives; a classifier passes on those of its model."""
    torch.manual_seed(0)
    encoder = PolysketchEncoderModel(
        PolysketchEncoderConfig(vocab_size=VOCABULARY, num_layers=LAYERS, hidden_size=32, num_heads=2)
    ).eval()
    output = encoder(ids, output_hidden_states=True)
    assert len(output.hidden_states) == LAYERS + 1
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    config = PolysketchConfig(vocab_size=VOCABULARY, num_layers=LAYERS, hidden_size=32, num_heads=2, num_labels=3)
    classifier = PolysketchForSequenceClassification(config).eval()
    found = classifier(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, classifier.model(ids, output_hidden_states=True).hidden_states)
