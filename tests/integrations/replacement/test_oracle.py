"""Softmax attention put in the place of softmax attention changes nothing: the oracle of all that is passed along."""

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from attention.covering import pairs_always
from integrations.replacement.models import (
    LAYERS,
    LENGTH,
    MODELS,
    WINDOW,
    assert_same_generation,
    generate,
    left_padding,
    load,
    logits,
    text,
)
from polysketch import replace_attention
from polysketch.integrations.replacement import replaced_mechanisms
from polysketch.integrations.replacement.masks import DeferredMask

REPLACED = {"original": tuple(MODELS), "replaced": ("all", -1, (0, 2))}


@pytest.fixture(scope="module")
def original(request, folder):
    """An unmodified model."""
    return load(folder, request.param)


@pytest.fixture
def replaced(request, original, folder):
    """The same model with the mechanism "softmax" in all or some of its layers."""
    model = load(folder, original.config.model_type)
    layers = list(request.param) if isinstance(request.param, tuple) else request.param
    assert replace_attention(model, "softmax", layers=layers) is model
    return model


@pytest.mark.parametrize(
    ("original", "replaced", "side"),
    pairs_always({**REPLACED, "side": ("none", "left", "right")}),
    indirect=["original", "replaced"],
)
def test_softmax_in_the_place_of_softmax_gives_the_models_own_logits(original, replaced, side):
    """At every real token, whichever side is padded."""
    ids = text()
    mask = {"none": None, "left": left_padding(ids), "right": left_padding(ids).flip(1)}[side]
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    found, expected = logits(replaced, ids, mask), logits(original, ids, mask)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("original", "replaced", "options"),
    pairs_always({**REPLACED, "options": ("greedy", "beams", "sampling")}),
    indirect=["original", "replaced"],
)
def test_it_generates_what_the_model_generates(original, replaced, options):
    """From a left-padded batch, with the caches that generate makes."""
    ids, options = text(), {"greedy": {}, "beams": {"num_beams": 3}, "sampling": {"do_sample": True}}[options]
    found = generate(replaced, ids, left_padding(ids), **options)
    assert_same_generation(found, generate(original, ids, left_padding(ids), **options))


def test_only_the_chosen_layers_are_replaced(folder):
    """-1 is the last, a list counts from either end."""
    model = load(folder, "llama")
    assert list(replaced_mechanisms(replace_attention(model, "softmax", layers=-1))) == [LAYERS - 1]
    assert list(replaced_mechanisms(replace_attention(model, "local", layers=[0, -1]))) == [0, LAYERS - 1]
    assert [type(each).__name__ for each in replaced_mechanisms(model).values()] == ["LocalAttention"] * 2


def test_the_mechanism_is_a_submodule_in_the_models_kind(folder):
    """Parameters and state_dict have it, and `to` moves it."""
    model = load(folder, "llama").to(torch.bfloat16)
    replace_attention(model, "hedgehog", layers=[1])
    name = "model.layers.1.self_attn.polysketch.feature_map"
    assert any(each.startswith(name) for each in model.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.double().parameters()} == {torch.float64}


def test_a_mechanism_that_stays_in_the_window_honours_it(folder):
    """Sliding-window attention in the place of a window, beyond its length."""
    original, model = load(folder, "mistral"), load(folder, "mistral")
    replace_attention(model, "sliding-window", window=WINDOW)
    ids = text(length=2 * WINDOW)
    torch.testing.assert_close(logits(model, ids), logits(original, ids), rtol=0, atol=2e-4)
    assert_same_generation(generate(model, ids, tokens=8), generate(original, ids, tokens=8))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_layers_keep_the_implementation_that_the_model_had(folder, implementation):
    """In a padded batch: each implementation wants a mask of its own kind."""
    original, model = load(folder, "llama"), load(folder, "llama")
    model.set_attn_implementation(implementation)
    replace_attention(model, "softmax", layers=[1])
    ids = text()
    mask = left_padding(ids)
    found, expected = logits(model, ids, mask), logits(original, ids, mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-4)


def test_masks_of_all_pairs_are_not_made_where_no_layer_wants_one(folder, monkeypatch):
    """A padded batch of a model whose layers are all replaced needs memory linear in its length."""
    model = replace_attention(load(folder, "llama"), "softmax")

    def made(mask, implementation):
        raise AssertionError("a mask of all pairs was made")

    monkeypatch.setattr(DeferredMask, "original", made)
    ids = text()
    assert logits(model, ids, left_padding(ids)).shape[1] == LENGTH


def test_heads_that_have_other_names_are_found():
    """GPT-NeoX: a projection of all three at once, half of each head rotated."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = GPTNeoXConfig(**sizes, **ends, intermediate_size=64, initializer_range=0.2)
    model, ids = GPTNeoXForCausalLM(config).eval(), text()
    mask = left_padding(ids)
    expected, written = logits(model, ids, mask), generate(model, ids, mask)
    replace_attention(model, "softmax")
    torch.testing.assert_close(logits(model, ids, mask)[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-4)
    assert_same_generation(generate(model, ids, mask), written)
    replace_attention(model, "polysketch", window=6, sketch_size=6)
    assert_same_generation(generate(model, ids, mask), generate(model, ids, mask, use_cache=False))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_within_its_window_polysketch_is_the_softmax_that_it_replaces(folder, name):
    """It has the options that suit such a model unless others are asked for. (Qwen3 norms queries and keys itself.)"""
    ids = text()
    mask = left_padding(ids)
    expected = logits(load(folder, name), ids, mask)
    model = replace_attention(load(folder, name), "polysketch", window=ids.shape[1], sketch_size=6)
    torch.testing.assert_close(logits(model, ids, mask)[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-4)
    replace_attention(model, "polysketch", window=ids.shape[1], sketch_size=6, normed=True)
    assert (logits(model, ids, mask) - expected)[mask.bool()].abs().max() > 0.01
