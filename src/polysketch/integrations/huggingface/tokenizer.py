"""Our tokenizers as tokenizers of transformers: plain files that AutoTokenizer loads, with the same ids."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from polysketch.data import TokenizerLike
from polysketch.data.tokenization import BpeTokenizer, BytesTokenizer, JsonTokenizer, SentencePieceTokenizer
from polysketch.data.tokenization.base import LOSSLESS_PROBE
from polysketch.data.tokenization.decoders import byte_alphabet
from polysketch.data.tokenization.end_of_text import END_OF_TEXT
from polysketch.data.tokenization.sentence_pieces import SPACE_MARK

PROBES = (
    "",
    " ",
    "\n\n  \n",
    "a" * 300,
    " " * 77,
    "\x00\x01\x02\x7f\t\r\n",
    "\u2028\ufeff\u200d \u2581x\u2581\u2581",
    "naïve façade, 10 € — 日本語 🙂👩‍👩‍👧",
    "<unk> <0x41> <s> </s> <|endoftext|> [MASK]",
    LOSSLESS_PROBE,
)
"""Texts on which tokenizers differ that differ at all."""

NOT_OF_TRAINING: dict[str, None] = {"post_processor": None, "truncation": None, "padding": None}
"""Parts of a tokenizer.json that add tokens to a text, or cut or pad it: no text was prepared with them."""

_LARGEST_SAMPLE = 20_000
_NEVER = -1e6
"""A score so low that a piece of a unigram model is taken only where nothing else fits."""


def to_fast_tokenizer(tokenizer: TokenizerLike) -> PreTrainedTokenizerFast:
    """The same tokenizer for transformers, padding on the left with the end of text.

    Ids are those of `tokenizer.encode`: no special token is added, and text that spells one stays text. (Sentencepiece
    adds scores in float32 along the whole text and this in float64: in single texts of a megabyte we saw two tokens of
    some 400,000 differ, and none in texts up to a few kilobytes.)

    Args:
        tokenizer: of bytes, byte-level BPE, sentencepiece, or any tokenizer.json.

    Returns:
        A tokenizer whose `save_pretrained` writes files that `AutoTokenizer.from_pretrained` loads without any code.

    Raises:
        ValueError: its ids are not the same on a set of odd texts and on the vocabulary's own pieces: a sentencepiece
            model that normalises text, or that is not of the unigram kind, for one.
    """
    backend = _backend(tokenizer)
    end_of_text = backend.id_to_token(tokenizer.end_of_text)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=end_of_text,
        eos_token=end_of_text,
        pad_token=end_of_text,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    require_same_ids(tokenizer, fast)
    return fast


def require_same_ids(tokenizer: TokenizerLike, fast: Any) -> None:
    """Compare the two on odd texts and on the vocabulary's pieces.

    Raises:
        ValueError: they differ, with the first such text.
    """
    pieces = [tokenizer.decode([index]) for index in range(min(tokenizer.vocab_size, _LARGEST_SAMPLE))]
    halves = ("".join(pieces[::2]), "".join(pieces[1::2]))
    for text in (*PROBES, *halves):
        expected, found = tokenizer.encode(text), fast(text)["input_ids"]
        if found != expected or (tokenizer.lossless and fast.decode(found) != text):
            raise ValueError(
                f"expected a tokenizer of transformers with the ids of {tokenizer.name}, found others for the text "
                f"{text[:40]!r}: a sentencepiece model that normalises text or is no unigram model cannot be exported"
            )


def _backend(tokenizer: TokenizerLike) -> tokenizers.Tokenizer:
    if isinstance(tokenizer, BytesTokenizer):
        return _bytes_backend()
    if isinstance(tokenizer, BpeTokenizer | JsonTokenizer):
        return _file_backend(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _unigram_backend(tokenizer)
    raise ValueError(f"expected a tokenizer of bytes, bpe, sentencepiece or json, found {tokenizer.name}")


def _bytes_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE without a merge: an id is a byte."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _file_backend(tokenizer: BpeTokenizer | JsonTokenizer) -> tokenizers.Tokenizer:
    """The file as it is, but for what would add tokens, or cut or pad texts."""
    contents = json.loads(tokenizer.serialized()) | NOT_OF_TRAINING
    return tokenizers.Tokenizer.from_str(json.dumps(contents))


def _unigram_backend(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """The pieces with spaces in the place of sentencepiece's mark: a mark in the text is then a character like others.

    Bytes and control pieces must have their names in the vocabulary, but text that spells them is not to become them.
    """
    processor = tokenizer.processor
    scored, names = [], set()
    for index in range(processor.vocab_size()):
        piece = processor.id_to_piece(index)
        special = processor.IsByte(index) or processor.IsControl(index) or processor.IsUnknown(index)
        scored.append((piece, _NEVER) if special else (piece.replace(SPACE_MARK, " "), processor.get_score(index)))
        names |= set(piece) if special else set()
    model = tokenizers.models.Unigram(scored, unk_id=processor.unk_id(), byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    unknown = sorted(names - {piece for piece, _ in scored})
    if unknown:  # with one of these inside, a name would still beat its characters
        alone = tokenizers.Regex(f"[{''.join(re.escape(character) for character in unknown)}]")
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(alone, "isolated")
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([processor.id_to_piece(tokenizer.end_of_text)])
    return backend
