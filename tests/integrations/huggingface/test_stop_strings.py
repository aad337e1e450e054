"""`generate` stops at strings, of our models and of models in which attention was replaced."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from integrations.huggingface.counting import VOCABULARY, counting
from polysketch import replace_attention
from polysketch.integrations.huggingface import PolysketchEncoderDecoderConfig, PolysketchForSeq2SeqLM

NEW = 20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Token 7 is the word w07. transformers puts "abcdef" before words to see how they are joined."""
    known = {f"w{index:02d}": index for index in range(VOCABULARY)} | {"abcdef": VOCABULARY}
    words = Tokenizer(WordLevel(known, unk_token="w00"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w00")


def replaced_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.4, **sizes)).eval()
    return replace_attention(model, "polysketch", window=8, sketch_size=4)


def assert_stops(model, tokenizer, ids, start: int, **given) -> None:
    """After the first word of the string, which comes in the middle of what is written without it."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW, **given}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, start:]
    words = [f"w{int(index):02d}" for index in written]
    asked = words[5]
    first = words.index(asked)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), stop_strings=[asked], tokenizer=tokenizer, **options
    )[0, start:]
    assert found.tolist() == written[: first + 1].tolist()
    assert len(found) < NEW


def test_our_models_stop(counting_model, tokenizer):
    ids = counting(1, 12, torch.Generator().manual_seed(0))
    assert_stops(counting_model("polysketch-paper"), tokenizer, ids, 12)


def test_beams_stop_too(counting_model, tokenizer):
    ids = counting(1, 12, torch.Generator().manual_seed(0))
    options = {"max_new_tokens": NEW, "num_beams": 2, "pad_token_id": 0, "eos_token_id": None}
    model = counting_model("polysketch-paper")
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), stop_strings=["w05", "w17"], tokenizer=tokenizer, **options
    )
    assert found.shape[1] <= 12 + NEW


def test_a_model_with_replaced_attention_stops(tokenizer):
    ids = counting(1, 12, torch.Generator().manual_seed(0))
    assert_stops(replaced_llama(), tokenizer, ids, 12)


def test_a_model_that_reads_and_writes_stops(tokenizer):
    torch.manual_seed(1)
    sides = {"hidden_size": 32, "num_heads": 2, "num_layers": 1, "vocab_size": VOCABULARY}
    config = PolysketchEncoderDecoderConfig(encoder=sides, decoder=sides, decoder_start_token_id=1)
    model = PolysketchForSeq2SeqLM(config).eval()
    ids = counting(1, 12, torch.Generator().manual_seed(0))
    assert_stops(model, tokenizer, ids, 1, repetition_penalty=5.0)
