"""Undoing a replacement, and replacing again."""

import copy

import pytest
import torch
from transformers import AttentionInterface, LlamaForCausalLM

from integrations.replacement.models import MODELS, generate, left_padding, load, logits, sketch, text
from polysketch import load_replaced, replace_attention, restore_attention, save_replaced
from polysketch.integrations.replacement import replaced_mechanisms


@pytest.mark.parametrize("name", MODELS)
def test_a_restored_model_is_what_it_was(folder, name):
    """Logits and generation bit for bit, names of weights, configuration, and no hook left."""
    model, ids = load(folder, name), text()
    config, names = copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    before, tokens = logits(model, ids, left_padding(ids)), generate(model, ids).sequences
    sketch(model, layers=[0, 2])
    assert not torch.equal(logits(model, ids, left_padding(ids)), before)
    assert restore_attention(model) is model
    assert torch.equal(logits(model, ids, left_padding(ids)), before)
    assert torch.equal(generate(model, ids).sequences, tokens)
    assert list(model.state_dict()) == names
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert not model.base_model._forward_pre_hooks
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(model.config)}


def test_replacing_twice_replaces_the_replacement_and_restoring_gives_the_original(folder):
    """Layers that the second call does not name keep the first."""
    model, ids = load(folder, "llama"), text()
    before = logits(model, ids)
    replace_attention(model, "hedgehog")
    replace_attention(model, "softmax", layers=[1])
    assert [type(each).__name__ for each in replaced_mechanisms(model).values()] == [
        "HedgehogAttention",
        "SoftmaxAttention",
        "HedgehogAttention",
    ]
    assert torch.equal(logits(restore_attention(model), ids), before)


def test_restoring_what_was_not_replaced_does_nothing(folder):
    """So that it can be called in any case."""
    model = load(folder, "llama")
    assert restore_attention(model) is model
    assert replaced_mechanisms(model) == {}


def test_a_copy_is_replaced_by_itself(folder):
    """Restoring a deep copy leaves the model alone, and the other way round."""
    model = sketch(load(folder, "llama"))
    other = copy.deepcopy(model)
    assert torch.equal(logits(model, text()), logits(other, text()))
    expected = generate(model, text()).sequences
    restore_attention(other)
    assert torch.equal(logits(other, text()), logits(load(folder, "llama"), text()))
    assert torch.equal(generate(model, text()).sequences, expected)


def test_a_model_is_replaced_whatever_the_registry_held(folder, monkeypatch):
    """Replacing registers anew."""
    monkeypatch.delitem(AttentionInterface._global_mapping, "polysketch")
    model = replace_attention(load(folder, "llama"), "softmax")
    torch.testing.assert_close(logits(model, text()), logits(load(folder, "llama"), text()), rtol=0, atol=2e-4)


def test_a_replacement_that_fails_changes_nothing(folder):
    """Mechanisms are built before the model is touched."""
    model = load(folder, "llama")
    names = list(model.state_dict())
    with pytest.raises(ValueError, match="no option 'wndow'"):
        replace_attention(model, "sliding-window", wndow=3)
    assert list(model.state_dict()) == names
    assert model.config._attn_implementation == "sdpa"


def test_models_made_from_one_configuration_are_replaced_each_by_itself(folder, tmp_path):
    """Saved, replaced in some layers and restored; a third one stays what it was."""
    config = load(folder, "llama").config
    first, second, third = (LlamaForCausalLM(config).eval() for _ in range(3))
    own = [logits(model, text()) for model in (first, second, third)]
    replace_attention(first, "sliding-window", window=8)
    replace_attention(second, "softmax", layers=[0])
    torch.testing.assert_close(logits(second, text()), own[1], rtol=0, atol=2e-4)
    expected = logits(first, text())
    save_replaced(first, tmp_path)
    assert torch.equal(logits(load_replaced(tmp_path), text()), expected)
    restore_attention(second)
    assert torch.equal(logits(second, text()), own[1])
    assert torch.equal(logits(third, text()), own[2])
    assert torch.equal(logits(first, text()), expected)
    assert config._attn_implementation == "sdpa"
    assert not hasattr(config, "polysketch_attention")


def test_a_model_made_from_the_configuration_of_a_replaced_one_is_refused(folder):
    """Nothing says what its own attention is."""
    other = LlamaForCausalLM(replace_attention(load(folder, "llama"), "softmax").config)
    with pytest.raises(ValueError, match="expected a model with attention of its own, found"):
        replace_attention(other, "softmax", layers=[0])
    other.set_attn_implementation("sdpa")
    assert logits(replace_attention(other, "softmax", layers=[0]), text()).isfinite().all()
