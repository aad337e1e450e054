"""A long text encoded in pieces has the tokens of the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.covering import first_always
from polysketch.data import encoding, long_texts, prepare
from polysketch.data.long_texts import encoded_in_pieces

PIECE, OVERLAP = 1500, 400


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", PIECE)
    monkeypatch.setattr(long_texts, "OVERLAP_CHARACTERS", OVERLAP)


WORDS = ["the", "of", " ", "  ", "\n", "\n\n", "é€", "😀", "lazy", "foxes'", "2,048", "-" * 9, " " * 28, "aaaa", "\t"]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
@pytest.mark.parametrize("seed", first_always(range(3)))
def test_pieces_have_the_tokens_of_the_whole(tokenizers, kind, seed):
    random = np.random.default_rng(seed)
    text = "".join(random.choice(WORDS) + random.choice(["", " "]) for _ in range(4000))
    pieces = list(encoded_in_pieces(tokenizers[kind], text))
    assert len(pieces) > len(text) // PIECE
    assert np.concatenate(pieces).tolist() == tokenizers[kind].encode(text)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
@pytest.mark.parametrize("text", ["a" * 9000, " " * 9001, "ab" * 5000, "x\n" * 5000, "é" * 5003, "1" * 4999 + " " * 99])
def test_text_that_repeats_itself_is_joined_rightly_too(tokenizers, kind, text):
    assert np.concatenate(list(encoded_in_pieces(tokenizers[kind], text))).tolist() == tokenizers[kind].encode(text)


def test_any_text_has_the_tokens_of_the_whole(tokenizers, monkeypatch):
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 60)
    monkeypatch.setattr(long_texts, "OVERLAP_CHARACTERS", 40)
    monkeypatch.setattr(long_texts, "AGREEMENT_TOKENS", 4)

    @settings(max_examples=60, deadline=None)
    @given(st.text(st.sampled_from("ab \n1.é"), min_size=120, max_size=500))
    def holds(text):
        for kind in ("bytes", "bpe"):
            assert np.concatenate(list(encoded_in_pieces(tokenizers[kind], text))).tolist() == tokenizers[kind].encode(
                text
            )

    holds()


@pytest.mark.usefixtures("small_pieces")
def test_joining_without_looking_would_be_seen(tokenizers, monkeypatch):
    """The test above can fail: pieces joined at a common end, whatever is around it, give other tokens."""
    monkeypatch.setattr(long_texts, "OVERLAP_CHARACTERS", 0)
    monkeypatch.setattr(long_texts, "_meeting", lambda before, after, begin_byte: (len(before.ids), 0))
    text = "the lazy foxes " * 600
    pieces = np.concatenate(list(encoded_in_pieces(tokenizers["bpe"], text)))
    assert pieces.tolist() != tokenizers["bpe"].encode(text)


def test_a_prepared_long_document_is_that_of_one_piece(write_files, tmp_path, monkeypatch, texts):
    folder = write_files({"train/a.jsonl": '{"text": "%s"}\n' % ("so many words. " * 3000), "test/b.txt": "x\n"})
    whole = prepare(folder, "bytes", tmp_path / "whole", progress=False)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1000)
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", PIECE)
    monkeypatch.setattr(long_texts, "OVERLAP_CHARACTERS", OVERLAP)
    pieces = prepare(folder, "bytes", tmp_path / "pieces", progress=False)
    assert (pieces.folder / "train.bin").read_bytes() == (whole.folder / "train.bin").read_bytes()
