"""A run's tokenizer in the interface of transformers gives the run's own ids."""

import io

import pytest
import sentencepiece

from polysketch.data.tokenization import BytesTokenizer, SentencePieceTokenizer
from polysketch.data.tokenization.sentence_pieces import LOSSLESS_SETTINGS
from polysketch.integrations.huggingface.tokenizer import PROBES, to_fast_tokenizer
from polysketch.integrations.lm_eval.tokenizer import RunTokenizer


@pytest.fixture(scope="module", params=["bytes", "bpe", "sentencepiece"])
def own(request, tokenizer):
    """One of every kind."""
    if request.param == "sentencepiece":
        return SentencePieceTokenizer.train([f"the {number} of a drum\n" for number in range(400)], 300)
    return BytesTokenizer() if request.param == "bytes" else tokenizer


@pytest.mark.parametrize("text", [*PROBES, "<|endoftext|>", " <|endoftext|> and more"])
def test_ids_and_texts_are_the_runs(own, text):
    """Of odd texts too: none is changed, and what spells a special token stays text."""
    wrapped, ids = RunTokenizer(own), own.encode(text)
    assert wrapped.encode(text) == ids
    assert wrapped(text)["input_ids"] == ids
    assert wrapped.decode(ids) == own.decode(ids)


def test_the_end_of_a_text_pads_on_the_left_and_has_a_name(own):
    """Its name is what generation stops at; as text it stands for nothing."""
    wrapped = RunTokenizer(own)
    end = own.end_of_text
    assert (wrapped.eos_token_id, wrapped.bos_token_id, wrapped.pad_token_id) == (end, end, end)
    assert wrapped.decode(end) == "<|endoftext|>"
    assert wrapped.decode([*own.encode("He"), end, end], skip_special_tokens=True) == "He"
    ids = own.encode("He sees it")
    padded = wrapped(["He sees it", "H"], padding="longest")
    assert padded["input_ids"][0] == ids
    assert padded["input_ids"][1] == [end] * (len(ids) - len(own.encode("H"))) + own.encode("H")
    assert padded["attention_mask"][1].count(1) == len(own.encode("H"))


def test_a_tokenizer_that_cannot_be_exported_is_served():
    """A sentencepiece model that normalises text has no fast form in transformers; its runs are evaluated."""
    model, lines = io.BytesIO(), iter([f"the {number} of a drum" for number in range(400)])
    options = LOSSLESS_SETTINGS | {"normalization_rule_name": "nmt_nfkc"}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, vocab_size=300, **options)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    lossy = SentencePieceTokenizer(processor, model.getvalue())
    with pytest.raises(ValueError, match="cannot be exported"):
        to_fast_tokenizer(lossy)
    text = "\ufb01ve drums of \u2460  each"
    assert RunTokenizer(lossy).encode(text) == lossy.encode(text)
    assert RunTokenizer(lossy).decode(lossy.encode(text)) == lossy.decode(lossy.encode(text)) != text
