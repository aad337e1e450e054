"""Tokenizers lose nothing, count bytes exactly, and refuse what does not fit."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polysketch.data import TOKENIZERS, load_tokenizer, require_same_tokenizer
from polysketch.data.tokenization import (
    BpeTokenizer,
    BytesTokenizer,
    SentencePieceTokenizer,
    build_tokenizer,
    parse_specification,
)

KINDS = ["bpe", "bytes", "sentencepiece"]
AWKWARD = [
    "",
    " ",
    "  two  spaces ",
    "a\u2581b \u2581\u2581",
    "line\r\nend\rof\nkinds\n\n",
    "<|endoftext|>",
    "</s><s><unk><pad><0x41>",
    "zero\u0000byte",
    "e\u0301 \u00e9 \uff21 \ufb01",
    "😀👩‍👩‍👧 日本語 \ufffd \ufeff",
    "tab\tand\u00a0no-break \u3000space",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", AWKWARD)
def test_decoding_gives_back_awkward_text(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_decoding_gives_back_any_text(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_counts_the_bytes_it_decodes_to(tokenizers, kind):
    tokenizer = tokenizers[kind]
    counts = tokenizer.token_bytes()
    assert counts.shape == (tokenizer.vocab_size,)
    assert [len(tokenizer.decode_bytes([index])) for index in range(tokenizer.vocab_size)] == counts.tolist()
    assert counts[tokenizer.end_of_text] == 0


def test_some_trained_tokens_hold_part_of_a_character_and_some_hold_several(tokenizers):
    pieces = [tokenizers["bpe"].decode_bytes([index]) for index in range(tokenizers["bpe"].vocab_size)]
    assert "日本語".encode() in pieces
    assert any(len(piece) > 1 and "\ufffd" in piece.decode(errors="replace") for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_encoded_as_its_texts_are(tokenizers, kind, texts):
    tokenizer = tokenizers[kind]
    assert tokenizer.encode_batch(texts[:5]) == [tokenizer.encode(text) for text in texts[:5]]


@pytest.mark.parametrize(("kind", "size"), [("bpe", 400), ("sentencepiece", 330)])
def test_training_twice_gives_the_same_file(tokenizers, kind, size, texts):
    again = TOKENIZERS[kind].train(iter(texts), size)
    assert again.serialized() == tokenizers[kind].serialized()
    assert again.vocab_size == size


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_keep_the_tokenizer(tokenizers, kind, tmp_path, texts):
    tokenizer = tokenizers[kind]
    path = tokenizer.save(tmp_path)
    loaded = BytesTokenizer() if path is None else load_tokenizer(path)
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode(texts[0]) == tokenizer.encode(texts[0])
    assert (loaded.end_of_text, loaded.lossless, loaded.name) == (tokenizer.end_of_text, True, tokenizer.name)


def test_long_lines_and_newlines_take_part_in_sentencepiece_training():
    tokenizer = SentencePieceTokenizer.train(["abcabc xyzxyz " * 2000], 310)
    assert len(tokenizer.encode("abcabc xyzxyz " * 10)) < 80


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [-1, 100_000])
def test_an_id_outside_the_vocabulary_is_refused(tokenizers, kind, index):
    with pytest.raises(ValueError, match="expected token ids in"):
        tokenizers[kind].decode([index])


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_refused(tokenizers, kind):
    with pytest.raises(ValueError, match="surrogate"):
        tokenizers[kind].encode("a\ud800")


def test_a_cut_character_decodes_to_a_replacement():
    assert BytesTokenizer().decode("é".encode()[:1]) == "\ufffd"


@pytest.mark.parametrize(
    "specification",
    ["bytes:300", "bpe", "bpe:256", "bpe:many", "sentencepiece", "sentencepiece:10", "words", "bpe:", "bpe:9999999999"],
)
def test_a_specification_that_means_nothing_is_refused(specification):
    with pytest.raises(ValueError, match="expected"):
        build_tokenizer(specification, lambda: ["text"])


def test_a_kind_without_a_case_here_is_only_read_from_files():
    """Its tests are in test_tokenizer_files.py."""
    assert set(TOKENIZERS) - set(KINDS) == {"json", "ids"}
    with pytest.raises(ValueError, match="expected a tokenizer that can encode text, found ids"):
        build_tokenizer("ids:300", lambda: ["text"])
    with pytest.raises(ValueError, match=r"path of a tokenizer\.json"):
        build_tokenizer("json", lambda: ["text"])


def test_an_existing_path_is_a_specification(tmp_path):
    assert parse_specification(str(tmp_path)) == (None, None)


def test_the_tokenizer_of_bytes_has_a_name_and_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("bytes").serialized() == BytesTokenizer().serialized()
    (tmp_path / "bytes").write_text("a file of this name is read")
    with pytest.raises(ValueError, match="bytes"):
        load_tokenizer("bytes")


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing at"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.json", b"{", "expected JSON in the tokenizer.json "),
        ("a.json", b"\xff\xfe\x00", "expected JSON in the tokenizer.json "),
        ("a.json", b"[1]", "other JSON"),
        ("a.json", json.dumps({"model": {"type": "WordPiece"}, "decoder": None}).encode(), "does not load"),
        (
            "a.json",
            json.dumps({"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}).encode(),
            "does not load",
        ),
        ("a.model", b"nonsense", "sentencepiece model"),
        ("a.txt", b"text", "ending in"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name, contents, message):
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizers, tmp_path):
    contents = json.loads(tokenizers["bpe"].serialized())
    contents["added_tokens"] = []
    contents["model"]["vocab"]["other"] = contents["model"]["vocab"].pop("<|endoftext|>")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"<\|endoftext\|>"):
        load_tokenizer(path)


def test_tokens_added_to_a_file_count_their_own_bytes(tokenizers, tmp_path):
    contents = json.loads(tokenizers["bpe"].serialized())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    contents["added_tokens"].append({"id": 400, "content": "    é"} | plain)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("    é") == [400]
    assert tokenizer.token_bytes()[400] == 6
    assert tokenizer.decode([400]) == "    é"


def test_a_normalising_tokenizer_says_that_it_loses_text(tokenizers, tmp_path):
    contents = json.loads(tokenizers["bpe"].serialized())
    contents["normalizer"] = {"type": "NFC"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    assert not load_tokenizer(path).lossless
    assert tokenizers["bpe"].lossless


def test_two_different_tokenizers_are_told_apart(tokenizers, texts):
    require_same_tokenizer(tokenizers["bpe"], tokenizers["bpe"], owner="the model", other="the data")
    other = BpeTokenizer.train(texts[:30], 400)
    with pytest.raises(ValueError, match=r"the model.*bpe:400.*the data"):
        require_same_tokenizer(tokenizers["bpe"], other, owner="the model", other="the data")
