"""Architectures with something of their own: OPT's decoder inside a decoder, Gemma 2's capped scores and windows."""

import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, OPTConfig, OPTForCausalLM

from integrations.replacement.models import VOCABULARY, text
from polysketch.integrations.replacement import (
    load_replaced,
    replace_attention,
    replacement_cache,
    restore_attention,
    save_replaced,
)

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPTIONS = {"window": 8, "sketch_size": 4}
NEW = 12


def opt() -> OPTForCausalLM:
    torch.manual_seed(3)
    sizes = {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 48, "max_position_embeddings": 128, "init_std": 0.2}
    return OPTForCausalLM(OPTConfig(**sizes, eos_token_id=None)).eval()


def gemma(cap: float | None = 2.0, window: int = 512) -> Gemma2ForCausalLM:
    torch.manual_seed(3)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 64, "initializer_range": 0.3}
    config = Gemma2Config(**sizes, attn_logit_softcapping=cap, sliding_window=window, query_pre_attn_scalar=12)
    config._attn_implementation = "eager"  # which caps
    return Gemma2ForCausalLM(config).eval()


def generated(model, **options):
    ids = text(2)
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)


class TestOPT:
    """Its head calls a decoder inside of the model."""

    def test_softmax_in_the_place_of_softmax_changes_nothing(self):
        model, ids = opt(), text()
        expected, tokens = model(ids).logits, generated(model)
        replace_attention(model, "softmax")
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
        assert torch.equal(generated(model), tokens)

    def test_a_state_gives_what_no_cache_gives(self):
        """Also one made before, and after several turns its bytes are as many."""
        model = replace_attention(opt(), "polysketch", **OPTIONS)
        expected = generated(model, use_cache=False)
        assert torch.equal(generated(model), expected)
        cache = replacement_cache(model)
        assert torch.equal(generated(model, past_key_values=cache), expected)
        assert sum(layer.nbytes for layer in cache.layers) > 0

    def test_it_is_restored_bit_for_bit(self):
        model, ids = opt(), text()
        expected = model(ids).logits
        replace_attention(model, "polysketch", **OPTIONS)
        assert not torch.equal(model(ids).logits, expected)
        assert torch.equal(restore_attention(model)(ids).logits, expected)
        generated(model)


class TestGemma2:
    """Scores are capped in all layers, and every second layer has a window."""

    def test_a_cap_is_refused_with_what_to_do(self):
        with pytest.raises(ValueError, match=r'caps its scores .*2\.0.*pass softcap="ignore"'):
            replace_attention(gemma(), "softmax")

    def test_the_cap_is_left_out_where_it_is_ignored(self):
        """The model is then one that has no cap, and no other."""
        ids, capped = text(), gemma()
        uncapped = gemma(cap=None)(ids).logits
        before = capped(ids).logits
        assert (before - uncapped).abs().max() > 1e-2
        replace_attention(capped, "softmax", softcap="ignore")
        torch.testing.assert_close(capped(ids).logits, uncapped, rtol=1e-4, atol=1e-4)

    def test_layers_that_are_not_replaced_keep_theirs(self):
        """With one layer replaced, the other one caps: the model is neither the capped nor the uncapped one."""
        ids, half = text(), gemma()
        replace_attention(half, "softmax", layers=[1], softcap="ignore")
        first = copy.deepcopy(gemma())
        first.model.layers[1].self_attn.attn_logit_softcapping = None
        torch.testing.assert_close(half(ids).logits, first(ids).logits, rtol=1e-4, atol=1e-4)

    def test_a_state_gives_what_no_cache_gives(self):
        model = replace_attention(gemma(window=16), "polysketch", softcap="ignore", sliding_window="ignore", **OPTIONS)
        assert torch.equal(generated(model), generated(model, use_cache=False))

    def test_consent_is_saved(self, tmp_path):
        model, ids = replace_attention(gemma(), "polysketch", softcap="ignore", **OPTIONS), text()
        save_replaced(model, tmp_path)
        assert torch.equal(load_replaced(tmp_path)(ids).logits, model(ids).logits)

    def test_other_words_are_refused(self):
        with pytest.raises(ValueError, match='softcap must be "refuse" or "ignore"'):
            replace_attention(gemma(), "softmax", softcap="keep")
