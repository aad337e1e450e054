"""Looking on: what a layer was given, its own softmax attention beside the mechanism's, gradients through both."""

import contextlib

import pytest
import torch

from integrations.replacement.models import LAYERS, left_padding, load, logits, text
from polysketch import replace_attention
from polysketch.integrations.replacement import (
    AttentionCall,
    around_attention,
    observing_attention,
    replaced_mechanisms,
)


def test_the_original_attention_is_at_hand_in_every_replaced_layer(folder):
    """A model that answers with it is the unmodified one, also where the architecture has a scaling of its own."""
    for name in ("llama", "gpt2"):
        original, model, ids = load(folder, name), load(folder, name), text()
        replace_attention(model, "polysketch-paper", local_chunk=8, sketch_size=8)
        mask, seen = left_padding(ids), []

        def answer(call: AttentionCall, seen=seen) -> torch.Tensor:
            seen.append(call.layer)
            return call.original()

        with observing_attention(model, answer):
            found = logits(model, ids, mask)
        torch.testing.assert_close(found[mask.bool()], logits(original, ids, mask)[mask.bool()], rtol=0, atol=2e-4)
        assert seen == list(range(LAYERS))
        assert not torch.equal(logits(model, ids, mask), found)


def test_the_tensors_are_those_of_the_mechanism(folder):
    """Heads are grouped, the mask is of keys, and the query scaled for the mechanism's own 1 / sqrt(head_dim)."""
    model, ids = replace_attention(load(folder, "gpt2"), "softmax", layers=[2]), text()
    mask, calls = left_padding(ids), []

    def look(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.replacement()

    with observing_attention(model, look), torch.no_grad():
        logits(model, ids, mask)
        logits(model, ids)
        own, replacement = calls[0].original(), calls[0].replacement()
    masked, unmasked = calls
    assert masked.mechanism is replaced_mechanisms(model)[2]
    assert masked.query.shape == masked.key.shape == masked.value.shape == (3, 4, ids.shape[1], 12)
    assert masked.scaling == pytest.approx(12**-0.5 / 3)
    assert torch.equal(masked.key_mask, mask.bool())
    assert unmasked.key_mask is None
    real = mask.bool()[:, None, :, None].expand_as(own)
    torch.testing.assert_close(replacement[real], own[real], rtol=0, atol=1e-5)


def test_gradients_flow_through_both(folder):
    """To the mechanism through its answer, to the projections through either."""
    model = replace_attention(load(folder, "llama"), "hedgehog", layers=[1])

    def compare(call: AttentionCall) -> torch.Tensor:
        errors.append((call.replacement() - call.original()).square().mean())
        return call.original()

    errors: list[torch.Tensor] = []
    with observing_attention(model, compare):
        model(text(), attention_mask=left_padding(text()))
    errors[0].backward()
    attention = model.model.layers[1].self_attn
    for parameter in (*attention.polysketch.parameters(), attention.q_proj.weight, attention.v_proj.weight):
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert attention.o_proj.weight.grad is None


def test_observing_ends_with_the_context_and_does_not_decode(folder):
    """Also when it ends by an error; while decoding from a cache there is nothing to compare with."""
    model = load(folder, "llama")
    with pytest.raises(ValueError, match="no attention was replaced"), observing_attention(model, lambda call: call):
        pass
    replace_attention(model, "hedgehog")
    before = logits(model, text())
    with pytest.raises(ZeroDivisionError), observing_attention(model, lambda call: 1 / 0):
        model(text())
    assert torch.equal(logits(model, text()), before)
    with observing_attention(model, AttentionCall.replacement), pytest.raises(ValueError, match="observed while decod"):
        model.generate(text(), max_new_tokens=2)


def test_every_layers_attention_can_be_timed_in_any_model(folder):
    """Replaced or not; a model that was unmodified is again."""
    model, layers = load(folder, "llama"), []

    @contextlib.contextmanager
    def note(layer):
        layers.append(layer)
        yield

    own = logits(model, text())
    with around_attention(model, note):
        torch.testing.assert_close(logits(model, text()), own)
    assert layers == list(range(LAYERS))
    assert model.config._attn_implementation == "sdpa"
    replace_attention(model, "softmax", layers=-1)
    with around_attention(model, note):
        logits(model, text())
    assert layers == 2 * list(range(LAYERS))
    assert list(replaced_mechanisms(model)) == [LAYERS - 1]
