"""A model with more or fewer token ids computes what it computed, and goes on training, saving and generating."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from integrations.huggingface.counting import VOCABULARY, counting
from polysketch.integrations.huggingface import (
    PolysketchConfig,
    PolysketchEncoderConfig,
    PolysketchEncoderDecoderConfig,
    PolysketchEncoderForMaskedLM,
    PolysketchForCausalLM,
    PolysketchForSeq2SeqLM,
)

MORE, FEWER = VOCABULARY + 5, VOCABULARY - 3


@pytest.fixture
def model() -> PolysketchForCausalLM:
    """With an output bias that says something, so that a lost one is seen."""
    torch.manual_seed(0)
    model = PolysketchForCausalLM(
        PolysketchConfig(vocab_size=VOCABULARY, num_layers=2, hidden_size=32, num_heads=2)
    ).eval()
    torch.nn.init.normal_(model.inner.output_bias)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return counting(2, 19, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [MORE, FEWER])
def test_old_ids_keep_their_logits(model, ids, size):
    ids = ids.clamp_max(FEWER - 1)
    before = model(ids).logits
    embedding = model.resize_token_embeddings(size)
    assert embedding is model.get_input_embeddings()
    assert embedding.num_embeddings == model.config.vocab_size == model.inner.config.vocab_size == size
    kept = min(size, VOCABULARY)
    after = model(ids).logits
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], rtol=0, atol=1e-5)


def test_new_ids_are_the_mean_of_the_old_ones(model):
    """So they are neither likely nor impossible."""
    model.resize_token_embeddings(MORE)
    for rows in (model.get_input_embeddings().weight, model.inner.output_bias):
        expected = rows[:VOCABULARY].mean(0).expand_as(rows[VOCABULARY:])
        torch.testing.assert_close(rows[VOCABULARY:], expected, rtol=0, atol=1e-3)


def test_without_the_mean_new_ids_are_those_of_a_new_model(model):
    """Of length 1 on average; those that torch draws would be of length 5.7 here."""
    model.resize_token_embeddings(VOCABULARY + 200, mean_resizing=False)
    new = model.get_input_embeddings().weight[VOCABULARY:]
    assert 0.8 < new.norm(dim=1).mean() < 1.2
    assert not model.inner.output_bias[VOCABULARY:].any()


def test_new_ids_are_read_learned_and_written(model, ids):
    """A gradient step on a text of a new id makes the model generate it."""
    model.resize_token_embeddings(MORE)
    ids = ids.clone()
    ids[:, 1::2] = MORE - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    found = model.generate(ids[:, :-1], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert MORE - 1 in found[:, -2:]


def test_it_is_saved_and_loaded_bit_for_bit(model, ids, tmp_path):
    model.resize_token_embeddings(MORE)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.vocab_size == MORE
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_size_is_rounded_up_and_none_changes_nothing(model):
    assert model.resize_token_embeddings(VOCABULARY + 1, pad_to_multiple_of=64).num_embeddings % 64 == 0
    size = model.config.vocab_size
    weight = model.get_input_embeddings().weight
    assert model.resize_token_embeddings().weight is weight
    assert model.config.vocab_size == size


def test_a_masked_language_model_is_resized_with_its_bias():
    torch.manual_seed(0)
    model = PolysketchEncoderForMaskedLM(
        PolysketchEncoderConfig(vocab_size=VOCABULARY, num_layers=1, hidden_size=32, num_heads=2)
    ).eval()
    ids = counting(2, 19, torch.Generator().manual_seed(0))
    before = model(ids).logits
    model.resize_token_embeddings(MORE)
    after = model(ids + 0).logits
    assert after.shape[-1] == len(model.output_bias) == MORE
    torch.testing.assert_close(after[..., :VOCABULARY], before, rtol=0, atol=1e-5)
    assert model(torch.full((1, 4), MORE - 1)).logits.isfinite().all()


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "30"])
def test_other_sizes_are_refused_and_change_nothing(model, ids, size):
    before = model(ids).logits
    with pytest.raises(ValueError, match="must be whole and at least 1"):
        model.resize_token_embeddings(size)
    assert torch.equal(model(ids).logits, before)


def test_two_vocabularies_are_refused():
    sides = {"hidden_size": 32, "num_heads": 2, "num_layers": 1, "vocab_size": VOCABULARY}
    model = PolysketchForSeq2SeqLM(PolysketchEncoderDecoderConfig(encoder=sides, decoder=sides))
    with pytest.raises(ValueError, match="has a vocabulary each"):
        model.resize_token_embeddings(MORE)
