"""Mechanisms that read vectors before rotary positions, and the layer's input, are given both in a replaced layer."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from attention.covering import first_always
from integrations.replacement import models
from integrations.replacement.models import (
    CHUNK,
    LAYERS,
    LENGTH,
    MODELS,
    assert_same_generation,
    generate,
    left_padding,
    load,
    logits,
    text,
)
from polysketch import load_replaced, replace_attention, replacement_cache, restore_attention, save_replaced
from polysketch.integrations.replacement import AttentionCall, attention_layers, looking, observing_attention

_SIZES: dict[str, Any] = {**models._SIZES, "head_dim": 12}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

OTHERS: dict[str, Callable[[], Any]] = {
    "scaled": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=_YARN)),
    "half-of-a-head": lambda: PhiForCausalLM(PhiConfig(**models._SIZES, partial_rotary_factor=0.5)),
    "neighbours": lambda: CohereForCausalLM(CohereConfig(**models._SIZES)),
    "half-of-a-head-neighbours": lambda: GlmForCausalLM(GlmConfig(**_SIZES)),
    "other-way-round": lambda: NanoChatForCausalLM(NanoChatConfig(**models._SIZES)),
    "some-layers": lambda: SmolLM3ForCausalLM(SmolLM3Config(**models._SIZES, no_rope_layers=[1, 0, 1])),
}
"""Other ways to rotate: scaled, a part of the head, which numbers make a pair, which way round, in some layers only."""

REPRESENTATIVE = ("gpt2", "half-of-a-head-neighbours", "some-layers")
ROTATING = [name for name in MODELS if name != "gpt2"] + list(OTHERS)


def fresh(name: str) -> Any:
    """A model of either table, with its own attention."""
    torch.manual_seed(3)
    return {**MODELS, **OTHERS}[name]().eval()


def with_delta(model: Any, layers: Any = "all") -> Any:
    """Replaced so that the window and what lies beyond are both heard, and what the layer was given too."""
    torch.manual_seed(5)
    options = {"window": CHUNK, "sketch_size": 6, "far_bias": 1.0, "normed": True}
    replace_attention(model, "polysketch", layers=layers, sliding_window="ignore", **options)
    for layer in attention_layers(model).values():
        if hasattr(layer, "polysketch"):
            for logit in (layer.polysketch.far_logit, layer.polysketch.strength_logit):
                nn.init.normal_(logit.weight, std=logit.hidden_size**-0.5)
    return model


class Seen(NamedTuple):
    """One layer: what its mechanism was given, and its input, as the layer was called with it."""

    call: AttentionCall
    hidden: Tensor


def look(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[Seen]:
    """Of every layer in one forward pass."""
    calls, inputs = [], []

    def answer(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.replacement()

    def keep(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        inputs.append(arguments[0] if arguments else keywords["hidden_states"])

    with ExitStack() as stack:
        for layer in attention_layers(model).values():
            stack.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
        stack.enter_context(observing_attention(model, answer))
        logits(model, ids, mask, use_cache=False)
    return [Seen(*pair) for pair in zip(calls, inputs, strict=True)]


@torch.no_grad()
def by_hand(seen: Seen) -> tuple[Tensor, Tensor]:
    """The projections of the layer's input, normed where the architecture does so, and never rotated."""
    layer: Any = seen.call.attention
    query, key = (each(seen.hidden).unflatten(-1, (-1, layer.head_dim)) for each in (layer.q_proj, layer.k_proj))
    query, key = getattr(layer, "q_norm", nn.Identity())(query), getattr(layer, "k_norm", nn.Identity())(key)
    return query.transpose(1, 2) * seen.call.scaling * layer.head_dim**0.5, key.transpose(1, 2)


@pytest.mark.parametrize("name", ROTATING)
def test_the_vectors_are_those_before_rotation(name):
    """In a padded batch; and the premise, that rotation changes them. A layer that rotates nothing has no others."""
    model, ids = with_delta(fresh(name)), text()
    for seen in look(model, ids, left_padding(ids)):
        call, rotates = seen.call, not (name == "some-layers" and seen.call.layer == 1)
        assert torch.equal(call.given["hidden"], seen.hidden)
        assert ("unrotated" in call.given) == rotates
        found, rotated = call.given.get("unrotated", (call.query, call.key)), (call.query, call.key)
        for own, handed_over, turned in zip(by_hand(seen), found, rotated, strict=True):
            size = float(own.abs().max())
            torch.testing.assert_close(handed_over, own, rtol=0, atol=2e-6 * size)
            assert ((turned - own).abs().max() > 0.5 * size) == rotates


def test_in_half_precision_too(folder):
    """Within the rounding of one rotation and back."""
    model = with_delta(load(folder, "llama", dtype=torch.bfloat16))
    for seen in look(model, text()):
        for found, own in zip(seen.call.given["unrotated"], by_hand(seen), strict=True):
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, own, rtol=0, atol=2**-7 * float(own.abs().max()))


def test_a_model_without_rotary_positions_hands_over_its_own(folder):
    """GPT-2's queries and keys know positions by the layer's input alone."""
    model = with_delta(load(folder, "gpt2"))
    for seen in look(model, text()):
        layer: Any = seen.call.attention
        assert list(seen.call.given) == ["hidden"]
        assert torch.equal(seen.call.given["hidden"], seen.hidden)
        query, key, _ = layer.c_attn(seen.hidden).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2).chunk(3, 1)
        torch.testing.assert_close(seen.call.query, query * seen.call.scaling * layer.head_dim**0.5)
        torch.testing.assert_close(seen.call.key, key)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in REPRESENTATIVE)) for name in [*ROTATING, "gpt2"]],
)
def test_decoding_token_by_token_is_the_forward_pass(name):
    """Of a left-padded batch five times as long as the window, beyond which 30 to 70 % of the mass lies."""
    model, ids = with_delta(fresh(name)), text()
    mask = left_padding(ids)
    calls = [seen.call for seen in look(model, ids, mask)]
    shares = [call.mechanism.prefix_share(call.query, call.key, key_mask=call.key_mask, **call.given) for call in calls]
    assert all(0.3 < share.mean() < 0.7 for share in shares)
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), replacement_cache(model)
    expected = logits(model, ids, mask, position_ids=positions, use_cache=False)
    found = [
        logits(model, ids[:, i : i + 1], mask[:, : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache)
        for i in range(LENGTH)
    ]
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-4)


@pytest.mark.parametrize("options", first_always([{"num_beams": 3}, {"prefill_chunk_size": 6}, {}], 2), ids=str)
def test_generation_with_states_is_generation_without_a_cache(folder, options):
    """In a model with a layer of its own attention between."""
    model, ids = with_delta(load(folder, "llama"), layers=[0, 2]), text()
    whole = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    found = generate(model, ids, left_padding(ids), **options)
    assert_same_generation(found, generate(model, ids, left_padding(ids), use_cache=False, **whole))


def test_tokens_that_are_taken_back_take_their_vectors_along(folder):
    """Assisted generation, which crops the cache to what it accepts."""
    model, ids = with_delta(load(folder, "llama")), text(rows=1, length=CHUNK + 3).repeat(1, 3)
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, use_cache=False)
    options = {"assistant_model": load(folder, "llama"), "past_key_values": replacement_cache(model)}
    assert model.generate(ids, max_new_tokens=30, do_sample=False, **options).tolist() == expected.tolist()


def test_a_loaded_model_computes_what_the_saved_one_did(folder, tmp_path):
    """It finds out by itself what to hand over."""
    model = with_delta(load(folder, "qwen3"), layers=[0, 2])
    save_replaced(model, tmp_path)
    other = load_replaced(tmp_path)
    assert torch.equal(logits(other, text()), logits(model, text()))
    assert [list(seen.call.given) for seen in look(with_delta(other), text())] == [["hidden", "unrotated"]] * LAYERS


def test_restoring_and_replacing_again_take_the_hooks_away(folder):
    """And a copy of the model has its own."""
    model, ids = load(folder, "llama"), text()
    own, replaced = logits(model, ids), logits(with_delta(model), ids)
    other = with_delta(load(folder, "llama"))
    assert torch.equal(logits(other, ids), replaced)
    assert torch.equal(logits(restore_attention(model), ids), own)
    replace_attention(other, "softmax")
    for each in (model, other):
        assert not any(layer._forward_pre_hooks for layer in attention_layers(each).values())


def test_looking_leaves_the_model_as_it_is(folder):
    """Its random numbers, its modes and its gradients."""
    model = load(folder, "gpt2").train()
    before = torch.random.get_rng_state()
    assert looking.look_at_layers(model, range(LAYERS)) == dict.fromkeys(range(LAYERS), False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_mechanisms_that_read_no_more_cost_no_more(folder, monkeypatch):
    """Their layers have no hook, and the model is not run when they are put in."""
    model = load(folder, "llama")
    monkeypatch.setattr(type(model.model), "forward", None)
    replace_attention(model, "polysketch-paper", local_chunk=CHUNK)
    assert not any(layer._forward_pre_hooks for layer in attention_layers(model).values())


@pytest.mark.parametrize(("name", "option"), [("polysketch-paper", "decay_gate"), ("polarity", "output_gate")])
def test_gates_on_the_layers_input_work_too(folder, name, option):
    """In generation as in one pass, and they are told the width of the input."""
    torch.manual_seed(5)
    model, ids = replace_attention(load(folder, "llama"), name, **{option: True}), text()
    assert all(list(seen.call.given) == ["hidden"] for seen in look(model, ids))
    found = generate(model, ids, left_padding(ids), tokens=8)
    assert_same_generation(found, generate(model, ids, left_padding(ids), tokens=8, use_cache=False))


def test_a_layer_that_is_called_without_its_hooks_is_refused(folder):
    """It would go on with rotated vectors."""
    model = with_delta(load(folder, "llama"))
    for layer in attention_layers(model).values():
        layer._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match="without its hooks"):
        logits(model, text())
