"""Decoding from states inside unmodified architectures: what generation without a cache gives, in constant memory."""

import copy

import pytest
import torch
from transformers import DynamicCache

from attention.covering import first_always
from integrations.replacement.models import (
    CHUNK,
    LENGTH,
    MODELS,
    assert_same_generation,
    generate,
    left_padding,
    load,
    logits,
    sketch,
    text,
)
from polysketch import replace_attention, replacement_cache, restore_attention
from polysketch.integrations.replacement import AttentionCall, StateLayer, observing_attention

OPTIONS = ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"prefill_chunk_size": 6})
EVERY_OPTION_OR_MODEL = [
    pytest.param(
        name,
        options,
        marks=[pytest.mark.full] * ("do_sample" in options or bool(name != "llama" and options)),
        id=f"{name}-{options}",
    )
    for name in MODELS
    for options in OPTIONS
]
LLAMA = pytest.mark.parametrize("model", first_always([*MODELS]), indirect=True)
"""The others in the full product, where the theorem is the cache's and not the architecture's."""


@pytest.fixture(scope="module", params=MODELS)
def model(request, folder):
    """A model with sketched attention in all layers."""
    return sketch(load(folder, request.param))


@pytest.fixture(scope="module")
def mixed(folder):
    """A Llama whose middle layer keeps its softmax."""
    return sketch(load(folder, "llama"), layers=[0, 2])


def test_both_the_chunk_and_the_prefix_are_heard(model):
    """The premise of the tests below: from 30 to 70 % of the attention mass is the prefix's."""
    shares = []

    def look(call: AttentionCall) -> torch.Tensor:
        shares.append(call.mechanism.prefix_share(call.query, call.key, key_mask=call.key_mask))
        return call.replacement()

    ids = text()
    with observing_attention(model, look):
        logits(model, ids, left_padding(ids), use_cache=False)
    assert ((torch.stack(shares).mean(1) > 0.3) & (torch.stack(shares).mean(1) < 0.7)).all()


@pytest.mark.parametrize(("model", "options"), EVERY_OPTION_OR_MODEL, indirect=["model"])
def test_generation_with_states_is_generation_without_a_cache(model, options):
    """Tokens and logits, of a left-padded batch whose padding crosses the ends of chunks."""
    ids = text()
    expected = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    found = generate(model, ids, left_padding(ids), tokens=3 * CHUNK, **options)
    plain = generate(model, ids, left_padding(ids), tokens=3 * CHUNK, use_cache=False, **expected)
    assert_same_generation(found, plain)
    # A text that says one thing over and over would tell little. Beams are close: which win depends on the processor.
    assert len(set(found.sequences[:, LENGTH:].flatten().tolist())) >= 10


def test_left_padding_changes_nothing(model):
    """A row alone and unpadded goes on as it does in the padded batch."""
    ids = text()
    mask = left_padding(ids)
    found = generate(model, ids, mask, tokens=8)
    alone = generate(model, ids[1:2, mask[1] == 1], tokens=8)
    assert found.sequences[1, LENGTH:].tolist() == alone.sequences[0, -8:].tolist()
    for padded, unpadded in zip(found.logits, alone.logits, strict=True):
        torch.testing.assert_close(padded[1:2], unpadded, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.full), {"num_beams": 3}, {"prefill_chunk_size": 6}], ids=str
)
def test_mixed_models_generate_the_same_too(mixed, options):
    """Layers with a state beside layers with keys and values."""
    ids = text()
    expected = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    found = generate(mixed, ids, left_padding(ids), **options)
    assert_same_generation(found, generate(mixed, ids, left_padding(ids), use_cache=False, **expected))


@pytest.mark.parametrize("name", ["hyper", "polynomial", "hedgehog"])
def test_other_mechanisms_generate_the_same_too(folder, name):
    """With a state that grows, and with one that is a sum alone."""
    model = replace_attention(load(folder, "llama"), name)
    ids = text()
    found = generate(model, ids, left_padding(ids))
    assert_same_generation(found, generate(model, ids, left_padding(ids), use_cache=False))


def state_bytes(cache: DynamicCache) -> list[int]:
    """Bytes of each layer of the cache."""
    return [
        layer.nbytes if isinstance(layer, StateLayer) else layer.keys.nbytes + layer.values.nbytes
        for layer in cache.layers
    ]


@LLAMA
def test_states_do_not_grow(model, mixed):
    """Plain generate carries as many bytes after 24 tokens as after 4; in a mixed model only the others grow."""
    few, many = (generate(model, text(), tokens=tokens).past_key_values for tokens in (4, 24))
    assert state_bytes(few) == state_bytes(many)
    few, many = (state_bytes(generate(mixed, text(), tokens=tokens).past_key_values) for tokens in (4, 24))
    assert few[0] == many[0]
    assert few[2] == many[2]
    assert many[1] > 1.3 * few[1]


@LLAMA
def test_several_turns_share_one_cache(model):
    """What a second turn gives is what the whole conversation gives at once; a copy of the cache goes its own way."""
    ids, cache = text(), replacement_cache(model)
    mask = left_padding(ids)
    first = generate(model, ids, mask, tokens=5, past_key_values=cache).sequences
    more = torch.cat([first, text(length=2 * CHUNK + 1).flip(0)], 1)
    mask = torch.nn.functional.pad(mask, (0, more.shape[1] - LENGTH), value=1)
    fork = copy.deepcopy(cache)
    expected = generate(model, more, mask, use_cache=False)
    assert_same_generation(generate(model, more, mask, past_key_values=cache), expected)
    assert_same_generation(generate(model, more, mask, past_key_values=fork), expected)


def test_a_loop_over_the_models_forward_decodes_too(mixed):
    """With an ordinary empty DynamicCache, in pieces of any length."""
    ids, cache = text(), DynamicCache()
    mask = left_padding(ids)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = logits(mixed, ids, mask, position_ids=positions)
    pieces = [
        logits(mixed, ids[:, a:b], mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache)
        for a, b in ((0, 13), (13, 14), (14, 37), (37, LENGTH))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1)[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-4)


@pytest.mark.parametrize("helped", [{"prompt_lookup_num_tokens": 4}, {"assistant": True}], ids=str)
def test_assisted_generation_takes_back_what_it_does_not_accept(mixed, folder, helped):
    """From a cache that records; without one it is refused."""
    ids = text(rows=1, length=CHUNK + 3).repeat(1, 3)
    options = {"assistant_model": load(folder, "llama")} if "assistant" in helped else helped
    expected = mixed.generate(ids, max_new_tokens=30, do_sample=False, use_cache=False)
    cache = replacement_cache(mixed)
    found = mixed.generate(ids, max_new_tokens=30, do_sample=False, past_key_values=cache, **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("changed", [slice(0, 3), slice(20, 22), slice(None)], ids=["shown", "hidden", "all shown"])
def test_a_mask_of_another_past_than_was_read_is_refused(mixed, changed):
    """A state cannot forget a token that it has read as a real one, nor read one that it has left out."""
    ids, cache = text(), replacement_cache(mixed)
    mask = left_padding(ids)
    logits(mixed, ids[:, :30], mask[:, :30], past_key_values=cache)
    assert any(layer.padding is not None for layer in cache.layers if isinstance(layer, StateLayer))
    same = logits(mixed, ids[:, 30:34], mask[:, :34], past_key_values=copy.deepcopy(cache))
    torch.testing.assert_close(same, logits(mixed, ids[:, :34], mask[:, :34])[:, 30:], rtol=1e-3, atol=1e-3)
    other = mask[:, :34].clone()
    other[:, changed] = 1 - other[:, changed] if changed.stop == 22 else 1
    with pytest.raises(ValueError, match="a state cannot forget a token"):
        logits(mixed, ids[:, 30:34], other, past_key_values=cache)


def test_what_a_state_has_left_out_goes_with_its_rows_and_comes_back_with_its_tokens(mixed):
    ids, cache = text(), replacement_cache(mixed)
    mask = left_padding(ids)
    cache.activate_past_recording()
    logits(mixed, ids[:, :30], mask[:, :30], past_key_values=cache)
    layer = next(layer for layer in cache.layers if isinstance(layer, StateLayer))
    expected = (mask[:, :30] == 0).sum(1)
    assert layer.padding.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1
    cache.crop(-28)
    assert layer.padding.tolist() == (mask[:, :2] == 0).sum(1).tolist()
    order = torch.arange(len(ids)).flip(0)
    cache.reorder_cache(order)
    assert layer.padding.tolist() == (mask[:, :2] == 0).sum(1)[order].tolist()


def test_a_cache_is_cropped_to_a_length_as_by_transformers(mixed, folder):
    """Above 0 the number says what stays, until transformers 5.18; below, what is taken back."""
    ids, unmodified = text(), load(folder, "llama")
    for number in (20, -10, 30, 99):
        ours, theirs = replacement_cache(mixed), DynamicCache()
        ours.activate_past_recording()
        for model, cache in ((mixed, ours), (unmodified, theirs)):
            logits(model, ids[:, :30], past_key_values=cache)
            cache.crop(number)
        assert [layer.get_seq_length() for layer in ours.layers] == [theirs.get_seq_length()] * len(ours.layers)


def test_a_cache_that_the_model_was_asked_to_make_has_states(mixed):
    """As guidance and loops over the model's forward ask for one."""
    ids = text()
    with torch.no_grad():
        first = mixed(ids[:, :30], use_cache=True)
        rest = mixed(ids[:, 30:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, logits(mixed, ids)[:, 30:], rtol=1e-3, atol=1e-3)
    assert any(isinstance(layer, StateLayer) for layer in first.past_key_values.layers)
    with torch.no_grad():
        assert mixed(ids, use_cache=False).past_key_values is None


def test_no_cache_is_made_where_one_may_be_given_by_position_or_the_model_is_observed(mixed):
    ids = text()
    expected = logits(mixed, ids, use_cache=False)
    with torch.no_grad():
        hidden = mixed.model(ids, None, None, None, use_cache=True).last_hidden_state
        torch.testing.assert_close(mixed.lm_head(hidden), expected, rtol=1e-3, atol=1e-3)
        with observing_attention(mixed, lambda call: call.replacement()):
            torch.testing.assert_close(mixed(ids, use_cache=True).logits, expected, rtol=1e-3, atol=1e-3)


def test_a_crop_that_is_refused_or_removes_nothing_leaves_the_cache_as_it_was(mixed):
    ids, cache = text(), replacement_cache(mixed)
    cache.activate_past_recording()
    logits(mixed, ids[:, :30], past_key_values=cache)
    logits(mixed, ids[:, 30:33], past_key_values=cache)
    layer = next(layer for layer in cache.layers if isinstance(layer, StateLayer))
    layer.crop(99)
    with pytest.raises(RuntimeError, match="only the 3 tokens"):
        layer.crop(-5)
    assert layer.state.position.tolist() == [33] * len(ids)
    layer.crop(-2)
    assert layer.state.position.tolist() == [31] * len(ids)


def test_a_copy_takes_back_what_the_cache_has_read_last(mixed):
    ids, cache = text(), replacement_cache(mixed)
    cache.activate_past_recording()
    logits(mixed, ids[:, :30], past_key_values=cache)
    for each in (copy.deepcopy(cache), cache):
        each.crop(-10)
        found = logits(mixed, ids[:, 20:30], past_key_values=each)
        torch.testing.assert_close(found, logits(mixed, ids[:, :30])[:, 20:], rtol=1e-3, atol=1e-3)


def test_guidance_by_a_prompt_left_out_is_the_same_with_states(mixed):
    ids = text()[:1]
    found = generate(mixed, ids, tokens=6, guidance_scale=1.5)
    plain = generate(mixed, ids, tokens=6, guidance_scale=1.5, use_cache=False)
    assert_same_generation(found, plain)


def test_assisted_generation_without_such_a_cache_is_refused(mixed):
    """It says what to pass."""
    with pytest.raises(RuntimeError, match="replacement_cache"):
        mixed.generate(text(rows=1).repeat(1, 2), max_new_tokens=30, prompt_lookup_num_tokens=4)


def test_caches_that_cannot_hold_states_are_refused(folder):
    """Static ones, ones with tokens already, another model's, and one from before attention was restored."""
    model, other = (sketch(load(folder, "llama")) for _ in range(2))
    with pytest.raises(TypeError, match="StaticCache"):
        generate(model, text(), cache_implementation="static")
    with pytest.raises(ValueError, match="holds 45 tokens as keys and values"):
        logits(model, text(), past_key_values=model(text()).past_key_values)
    with pytest.raises(ValueError, match="another model"):
        logits(model, text(), past_key_values=replacement_cache(other))
    cache = replacement_cache(model)
    restore_attention(model)
    with pytest.raises(ValueError, match="restored or replaced since"):
        logits(model, text(), past_key_values=cache)
    with pytest.raises(ValueError, match="no attention was replaced"):
        replacement_cache(model)


def test_a_cache_of_states_does_not_fool_an_unmodified_model(folder, mixed):
    """It would see the new tokens alone from its second call on."""
    model, cache = load(folder, "llama"), replacement_cache(mixed)
    logits(model, text(), past_key_values=cache)
    with pytest.raises(ValueError, match="never attended to"):
        logits(model, text(), past_key_values=cache)
