"""Tokenizers of transformers: a regular expression of a stranger ends in one line; other texts are as ever."""

import json

import pytest

from data.test_hostile_patterns import write_tokenizer
from polysketch.data.tokenization import bounded
from polysketch.integrations.chat import renderer
from polysketch.integrations.transformers_folder import read_tokenizer

pytest.importorskip("transformers")

ENDLESS = "a" * 40 + "! "
CALLS = {
    "call": lambda tokenizer, text: tokenizer(text)["input_ids"],
    "call of a batch": lambda tokenizer, text: tokenizer([text, "a"])["input_ids"][0],
    "encode": lambda tokenizer, text: tokenizer.encode(text, add_special_tokens=False),
    "tokenize": lambda tokenizer, text: tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)),
    "chat": lambda tokenizer, text: renderer(tokenizer, "{{ messages[0].content }}")([{"content": text}]),
}


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """Of a folder as transformers writes it, with a pattern that is endless on some texts."""
    write_tokenizer(tmp_path, r"(a|aa)+b")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    return read_tokenizer(tmp_path)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_pattern_that_takes_for_ever_is_refused_and_other_texts_are_not(tokenizer, call):
    assert call(tokenizer, "a") == [ord("a") - 32]
    with pytest.raises(ValueError, match="a regular expression in the tokenizer's file takes too long on this text"):
        call(tokenizer, ENDLESS)


def test_options_and_errors_pass_through(tokenizer):
    found = tokenizer(text="aa", text_pair="a", return_attention_mask=False, return_token_type_ids=False)
    assert found == {"input_ids": [*tokenizer("aa")["input_ids"], *tokenizer("a")["input_ids"]]}
    with pytest.raises(ValueError, match="text input must be of type"):
        tokenizer(5)
