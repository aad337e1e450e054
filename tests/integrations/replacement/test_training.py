"""Gradients, gradient checkpointing, adapters and compiling of a replaced model."""

import pytest
import torch

from integrations.replacement.models import CHUNK, generate, left_padding, load, logits, sketch, text
from polysketch import replace_attention, restore_attention
from polysketch.integrations.replacement import replaced_mechanisms


def gradients(model) -> dict[str, torch.Tensor]:
    """Of one loss on a left-padded batch, by name."""
    ids = text()
    mask = left_padding(ids)
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["polysketch-paper", "polysketch"])
def test_every_weight_learns_and_checkpointing_changes_nothing(folder, attention):
    """The mechanisms' weights too, and what is handed over is handed over again when a layer is computed again."""
    model = load(folder, "llama").train()
    if attention == "polysketch-paper":
        sketch(model, layers=[0, 2])
    else:
        replace_attention(model, attention, layers=[0, 2], window=CHUNK, sketch_size=6)
    plain = gradients(model)
    assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in plain.values())
    model.gradient_checkpointing_enable()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-5, atol=1e-7)


def test_adapters_of_peft_train_around_a_mechanism(folder):
    """At the projections; a wrapped model generates from states, and can be replaced and restored by its wrapper."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(load(folder, "llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert replace_attention(wrapped, "hedgehog") is wrapped
    assert len(replaced_mechanisms(wrapped)) == 3
    found = generate(wrapped, text(), left_padding(text()), tokens=5)
    assert found.past_key_values.layers[0].nbytes > 0
    wrapped(text(), labels=text()).loss.backward()
    trained = [parameter for name, parameter in wrapped.named_parameters() if "lora_B" in name]
    assert trained
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained)
    assert replaced_mechanisms(restore_attention(wrapped)) == {}


def test_adapters_train_around_a_mechanism_that_reads_more(folder):
    """They get a gradient by what it is handed over: with a window of one token, near weights do not depend on keys."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(load(folder, "llama"), peft.LoraConfig(target_modules=["k_proj"]))
    replace_attention(wrapped, "polysketch", window=1, sketch_size=6)
    wrapped(text(), labels=text()).loss.backward()
    trained = [parameter for name, parameter in wrapped.named_parameters() if "lora_B" in name]
    assert len(trained) == 3
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained)


def test_the_forward_pass_is_traced_and_packed_sequences_are_refused_there_too(folder):
    """In a compiled model nothing can branch on positions: the refusal is an operation of the graph."""
    model = load(folder, "llama")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    replace_attention(model, "softmax", layers=[1])
    compiled, ids = torch.compile(model, backend="eager"), text(rows=2)
    positions = torch.arange(ids.shape[1])[None]
    found = logits(compiled, ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(found, logits(model, ids, use_cache=False), rtol=0, atol=2e-4)
    with pytest.raises(RuntimeError, match="packed sequences"):
        compiled(ids, position_ids=positions % 15, use_cache=False)


@pytest.mark.full
def test_what_is_handed_over_is_traced_too(folder):
    """In one graph for all layers."""
    model = replace_attention(load(folder, "llama"), "polysketch", window=CHUNK, sketch_size=6)
    compiled, ids = torch.compile(model, backend="eager", fullgraph=True), text(rows=2)
    expected = logits(model, ids, use_cache=False)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), expected, rtol=0, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("layers", ["all", [1]], ids=str)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own compiler
def test_sketched_attention_compiles(folder, layers):
    """As people compile, with a mask and without."""
    model = sketch(load(folder, "llama"), layers=layers)
    compiled, ids = torch.compile(model), text()
    for mask in (None, left_padding(ids)):
        expected = logits(model, ids, mask, use_cache=False)
        found = logits(compiled, ids, mask, use_cache=False)
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=5e-4)
