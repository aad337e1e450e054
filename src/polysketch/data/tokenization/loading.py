"""Tokenizers out of files and folders: which files there are, which belong together, what a model folder declares."""

from __future__ import annotations

from pathlib import Path

from polysketch.data.compressed import plain_name, read_bytes
from polysketch.data.description import DESCRIPTION_FILE, DataDescription, TokenizerDescription
from polysketch.data.tokenization.base import TokenizerLike
from polysketch.data.tokenization.bpe import BpeTokenizer, describes_byte_level_bpe
from polysketch.data.tokenization.byte_values import BytesTokenizer
from polysketch.data.tokenization.end_of_text import declared_end_of_text
from polysketch.data.tokenization.ids import TokenIds
from polysketch.data.tokenization.json_file import JsonTokenizer, description_of
from polysketch.data.tokenization.sentence_pieces import SentencePieceTokenizer
from polysketch.storage.sums import is_no_weight, require_sums

TOKENIZERS: dict[str, type[TokenizerLike]] = {
    cls.kind: cls for cls in (BytesTokenizer, BpeTokenizer, SentencePieceTokenizer, JsonTokenizer, TokenIds)
}
# A byte-level BPE as two files, the vocabulary and the merges: OpenAI's names and those of transformers.
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
# What a model folder may hold, the first that is there is read.
FILES_OF_FOLDERS = ("tokenizer.json", *(first for first, _ in PAIRS), "tokenizer.model", "spiece.model")
COMPRESSED = ("", ".gz")


def load_tokenizer(path: str | Path, end_of_text: str | int | None = None) -> TokenizerLike:
    """Read a tokenizer: a file, the files of a model folder, or the tokenizer of a prepared folder or a run.

    Args:
        path: A tokenizer.json; encoder.json or vocab.bpe, vocab.json or merges.txt, with the other beside it; a
            sentencepiece .model; each also with .gz. Or a folder: one that ``prepare`` made, a run, or one of a
            transformers model, whose tokenizer_config.json, special_tokens_map.json, generation_config.json or
            config.json may declare the end of text. Or ``bytes``, where nothing is called so: its tokens are bytes.
        end_of_text: The token that ends a document, or its id; None for the declared one, else the one token of a usual
            name.

    Raises:
        FileNotFoundError: There is no such file or folder, or one of two files is missing.
        ValueError: It is none of these, is damaged, is not as the folder's SHA256SUMS has it, or it is not clear which
            token ends a document.
        ImportError: The extra that the kind needs is missing.
    """
    path = Path(path)
    if not path.exists():
        if str(path) == BytesTokenizer.kind and end_of_text is None:
            return BytesTokenizer()
        raise FileNotFoundError(
            f"expected {BytesTokenizer.kind}, a tokenizer file or a folder with one, found nothing at {path}"
        )
    return _of_folder(path, end_of_text) if path.is_dir() else _of_file(path, end_of_text)


def described_tokenizer(folder: Path, description: TokenizerDescription) -> TokenizerLike:
    """The tokenizer of a prepared folder, checked against its description.

    Raises:
        FileNotFoundError: The tokenizer file is gone.
        ValueError: The kind is unknown, or the file is not the one the data was prepared with.
    """
    if description.kind not in TOKENIZERS:
        raise ValueError(
            f"expected a tokenizer kind of {', '.join(TOKENIZERS)} in {folder}, found {description.kind!r}"
        )
    if description.file != TOKENIZERS[description.kind].file_name:
        raise ValueError(
            f"expected {TOKENIZERS[description.kind].file_name or 'no file'} as the tokenizer's file of kind "
            f"{description.kind} in {folder}, found {description.file!r}"
        )
    path = folder / (description.file or "")
    if not path.exists():
        raise FileNotFoundError(
            f"expected the tokenizer file {path}, found nothing: the folder was copied incompletely"
        )
    tokenizer = TOKENIZERS[description.kind].load(path, description.end_of_text)
    found = (tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text)
    expected = (description.sha256, description.vocab_size, description.end_of_text)
    if found != expected:
        raise ValueError(
            f"expected in {folder} the tokenizer its data was prepared with (sha256 {description.sha256[:12]}, "
            f"{description.vocab_size} ids), found another (sha256 {found[0][:12]}, {found[1]} ids): "
            "the tokenizer file was altered or exchanged; prepare again"
        )
    return tokenizer


def _of_folder(folder: Path, end_of_text: str | int | None) -> TokenizerLike:
    for prepared in (folder, folder / "tokenizer"):  # a prepared folder, or the copy in a run
        if (prepared / DESCRIPTION_FILE).exists():
            return _of_prepared(prepared, end_of_text)
    present = [folder / f"{name}{gz}" for name in FILES_OF_FOLDERS for gz in COMPRESSED]
    path = next((path for path in present if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"expected in {folder} a tokenizer ({', '.join(FILES_OF_FOLDERS)}) or {DESCRIPTION_FILE}, found none: this "
            "is no model folder and no folder made by polysketch prepare"
        )
    require_sums(folder, is_no_weight)
    return _of_file(path, declared_end_of_text(folder) if end_of_text is None else end_of_text)


def _of_prepared(folder: Path, end_of_text: str | int | None) -> TokenizerLike:
    if end_of_text is not None:
        raise ValueError(f"expected no end-of-text token beside {folder}, whose description has one: leave it out")
    return described_tokenizer(folder, DataDescription.read(folder / DESCRIPTION_FILE).tokenizer)


def _of_file(path: Path, end_of_text: str | int | None) -> TokenizerLike:
    name = plain_name(path)
    for pair in PAIRS:
        if name.endswith(pair):
            vocabulary, merges = _both_files(path, pair)
            return BpeTokenizer.from_vocabulary_and_merges(vocabulary, merges, end_of_text)
    if name.endswith(".model"):
        return SentencePieceTokenizer.load(path, end_of_text)
    if not name.endswith(".json"):
        raise ValueError(f"expected a tokenizer file ending in .json, .model, .bpe or merges.txt, found {path}")
    contents = read_bytes(path)
    kind = BpeTokenizer if describes_byte_level_bpe(description_of(contents, path)) else JsonTokenizer
    return kind.from_bytes(contents, path, end_of_text)


def _both_files(path: Path, pair: tuple[str, str]) -> tuple[Path, Path]:
    """The vocabulary and the merges, whichever of them was named: the same name up to its ending."""
    name = plain_name(path)
    beginning = next(name.removesuffix(ending) for ending in pair if name.endswith(ending))
    return _beside(path, beginning + pair[0]), _beside(path, beginning + pair[1])


def _beside(path: Path, name: str) -> Path:
    found = [path.with_name(name + gz) for gz in COMPRESSED if path.with_name(name + gz).is_file()]
    if not found:
        raise FileNotFoundError(f"expected {name} beside {path}, found none: a vocabulary needs its merges")
    return path if path in found else found[0]
