"""Tokenizers that others made give the ids of the `tokenizers` library, and end documents with the right token."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers as library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.test_tokenization import AWKWARD
from polysketch.data import PreparedData, load_tokenizer, prepare
from polysketch.data.tokenization import BpeTokenizer, JsonTokenizer, build_tokenizer

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.fixture
def with_specials(tokenizers, tmp_path) -> Callable[..., Path]:
    """A function that writes a byte-level tokenizer.json with these special tokens and no other."""

    def write(*names: str, folder: str = "model") -> Path:
        contents = json.loads(tokenizers["bpe"].serialized())
        contents["added_tokens"] = [
            {"id": 400 + number, "content": name, "special": True} | PLAIN for number, name in enumerate(names)
        ]
        contents["model"]["vocab"]["unused"] = contents["model"]["vocab"].pop("<|endoftext|>")
        path = tmp_path / folder / "tokenizer.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(contents))
        return path

    return write


@pytest.fixture
def pair(tokenizers, tmp_path) -> Path:
    """GPT-2's two files, for the trained tokenizer, in a folder."""
    model = json.loads(tokenizers["bpe"].serialized())["model"]
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "tiny_encoder.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (folder / "tiny_vocab.bpe").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    return folder


def llama_like(texts: list[str]) -> library.Tokenizer:
    """A BPE of characters with spaces as marks, a space before the text, and bytes for what is unknown."""
    tokenizer = library.Tokenizer(library.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    parts = [library.decoders.Replace("▁", " "), library.decoders.ByteFallback(), library.decoders.Fuse()]
    tokenizer.decoder = library.decoders.Sequence([*parts, library.decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = library.trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    contents = json.loads(tokenizer.to_str())
    contents["added_tokens"] = contents["added_tokens"][:3]
    return library.Tokenizer.from_str(json.dumps(contents))


def word_piece(texts: list[str]) -> library.Tokenizer:
    """BERT's kind: whole words, and continuations that begin with ##."""
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def unigram(texts: list[str]) -> library.Tokenizer:
    """T5's kind: unigram with a mark for each space."""
    tokenizer = library.Tokenizer(library.models.Unigram())
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
    tokenizer.decoder = library.decoders.Metaspace()
    trainer = library.trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


OTHERS = {"llama-like": (llama_like, "</s>"), "WordPiece": (word_piece, "[SEP]"), "unigram": (unigram, "</s>")}


@pytest.mark.parametrize("name", OTHERS)
def test_any_tokenizer_json_gives_the_ids_of_the_library_and_its_text(name, texts, tmp_path):
    make, end = OTHERS[name]
    theirs = make(texts)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json", end)
    assert isinstance(ours, JsonTokenizer)
    assert ours.kind == "json"
    assert ours.end_of_text == theirs.token_to_id(end)
    words = ["the state of a chunk", "sketch query key and value", "x+1 def return"]
    for text in words:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids).strip().replace(" ", "") == text.replace(" ", "")
        assert ours.token_bytes()[ids].sum() == len(ours.decode(ids).encode())
    assert ours.end_of_text not in ours.encode(f"the {end} state")
    assert not ours.lossless


def test_bytes_stand_for_characters_that_a_vocabulary_lacks(texts, tmp_path):
    llama_like(texts).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("a𓀀")
    assert ids[-4:] == [3 + value for value in "𓀀".encode()]
    assert tokenizer.decode(ids) == " a𓀀"
    assert tokenizer.token_bytes()[ids[-4:]].tolist() == [1, 1, 1, 1]


def test_a_decoder_whose_tokens_have_no_bytes_is_refused(tokenizers, tmp_path):
    contents = json.loads(tokenizers["bpe"].serialized())
    contents["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(ValueError, match="CTC"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["tiny_encoder.json", "tiny_vocab.bpe"])
@pytest.mark.parametrize("compressed", [(), ("tiny_encoder.json",), ("tiny_encoder.json", "tiny_vocab.bpe")])
@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_vocabulary_and_merges_are_one_tokenizer_whichever_is_named(pair, tokenizers, texts, name, compressed, names):
    renamed = {"tiny_encoder.json": f"tiny_{names[0]}", "tiny_vocab.bpe": f"tiny_{names[1]}"}
    for old, new in renamed.items():
        (pair / old).rename(pair / new)
    for each in compressed:
        path = pair / renamed[each]
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    tokenizer = load_tokenizer(pair / f"{renamed[name]}{'.gz' if name in compressed else ''}")
    assert isinstance(tokenizer, BpeTokenizer)
    assert tokenizer.encode_batch(texts) == tokenizers["bpe"].encode_batch(texts)
    assert tokenizer.end_of_text == tokenizers["bpe"].end_of_text
    assert tokenizer.token_bytes().tolist() == tokenizers["bpe"].token_bytes().tolist()
    assert tokenizer.lossless


def test_a_folder_with_vocabulary_and_merges_is_a_tokenizer(pair, tokenizers):
    for path in list(pair.iterdir()):
        path.rename(path.with_name(path.name.removeprefix("tiny_")))
    assert load_tokenizer(pair).encode("the sketch") == tokenizers["bpe"].encode("the sketch")


def test_merges_that_are_missing_or_of_others_are_named(pair):
    merges = pair / "tiny_vocab.bpe"
    for contents, message in [("q q\n", "belong"), ("a b c\n", "two tokens"), ("", "two tokens")]:
        merges.write_text(contents)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(pair / "tiny_encoder.json")
    merges.unlink()
    with pytest.raises(FileNotFoundError, match=r"tiny_vocab\.bpe beside"):
        load_tokenizer(pair / "tiny_encoder.json")


@pytest.mark.parametrize("contents", ["[1]", "{}", '{"a": "b"}', "{"])
def test_a_vocabulary_that_is_none_is_refused(pair, contents):
    (pair / "tiny_encoder.json").write_text(contents)
    with pytest.raises(ValueError, match="expected"):
        load_tokenizer(pair / "tiny_encoder.json")


def test_a_damaged_gzip_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    with pytest.raises(ValueError, match=r"gzip.*tokenizer\.json\.gz"):
        load_tokenizer(tmp_path / "tokenizer.json.gz")


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_the_one_usual_name_ends_documents(with_specials, name):
    path = with_specials("<pad>", name, "<|im_end|>")
    assert load_tokenizer(path).end_of_text == 401


@pytest.mark.parametrize(("names", "found"), [((), "none"), (("<pad>",), "<pad>"), (("</s>", "<eos>"), "</s>, <eos>")])
def test_an_unclear_end_of_text_is_refused_until_it_is_named(with_specials, names, found):
    path = with_specials(*names)
    with pytest.raises(ValueError, match=rf"found .*{found}.*--end-of-text") as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    if names:
        assert load_tokenizer(path, names[-1]).end_of_text == 399 + len(names)


def test_an_end_of_text_that_is_not_there_or_that_text_can_spell_is_refused(with_specials):
    path = with_specials("<|im_end|>", "</s>")
    with pytest.raises(ValueError, match=r"'<im_end>'.*did you mean '<\|im_end\|>'"):
        load_tokenizer(path, "<im_end>")
    with pytest.raises(ValueError, match="text cannot spell"):
        load_tokenizer(path, "a")
    with pytest.raises(ValueError, match="no such id"):
        load_tokenizer(path, 5000)


@pytest.mark.parametrize(
    ("files", "token"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "config.json": {"eos_token_id": 400}}, 401),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, 401),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": "<|im_end|>"}}, 401),
        ({"generation_config.json": {"eos_token_id": [401]}}, 401),
        ({"config.json": {"eos_token_id": 401}}, 401),
        ({"config.json": {}}, 400),
    ],
)
def test_a_model_folder_declares_its_end_of_text(with_specials, files, token):
    folder = with_specials("</s>", "<|im_end|>").parent
    for name, contents in files.items():
        (folder / name).write_text(json.dumps(contents))
    assert load_tokenizer(folder).end_of_text == token
    assert load_tokenizer(folder, "</s>").end_of_text == 400


def test_a_model_folder_that_declares_several_is_refused(with_specials):
    folder = with_specials("</s>", "<|im_end|>").parent
    (folder / "generation_config.json").write_text('{"eos_token_id": [400, 401]}')
    with pytest.raises(ValueError, match=r"generation_config\.json, found 2.*--end-of-text"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"JSON in .*tokenizer_config\.json"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json.*found none"):
        load_tokenizer(tmp_path)


def test_a_folder_saved_by_transformers_is_a_tokenizer(tokenizers, texts, tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=library.Tokenizer.from_str(tokenizers["bpe"].serialized().decode()), eos_token="<|endoftext|>"
    )
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.encode(texts[0]) == theirs(texts[0])["input_ids"]
    assert ours.end_of_text == theirs.eos_token_id


def test_the_chosen_end_of_text_is_kept_with_the_data(with_specials, corpus_folder, tmp_path):
    path = with_specials("</s>", "<|im_end|>")
    shares = {"validation_share": 0.2, "test_share": 0.2, "progress": False}
    prepare(corpus_folder, str(path), tmp_path / "data", end_of_text="<|im_end|>", **shares)
    data = PreparedData.open(tmp_path / "data")
    assert data.tokenizer.end_of_text == data.description.end_of_text == 401
    assert data.split("train").tokens[-1] == 401
    assert load_tokenizer(tmp_path / "data").sha256 == data.tokenizer.sha256 != load_tokenizer(path).sha256
    with pytest.raises(ValueError, match="leave it out"):
        load_tokenizer(tmp_path / "data", "</s>")


@pytest.mark.parametrize("specification", ["bytes", "bpe:400", "sentencepiece:400"])
def test_an_end_of_text_for_a_tokenizer_that_makes_its_own_is_refused(specification):
    with pytest.raises(ValueError, match="has its own"):
        build_tokenizer(specification, lambda: ["text"], "</s>")


def test_a_control_piece_of_a_sentencepiece_model_can_end_documents(tokenizers, tmp_path):
    path = tokenizers["sentencepiece"].save(tmp_path)
    usual = load_tokenizer(path)
    assert load_tokenizer(path, "<|endoftext|>").sha256 == usual.sha256
    with pytest.raises(ValueError, match=r"</s>.*control pieces are <\|endoftext\|>"):
        load_tokenizer(path, "</s>")


@pytest.fixture(scope="module")
def published(outside_data: Path) -> dict[str, BpeTokenizer]:
    """GPT-2's and GPT-NeoX's, as they were published."""
    folder = outside_data / "tokenizers"
    names = {"gpt2": "gpt2_encoder.json.gz", "neox": "gptneox_20B_tokenizer.json.gz"}
    return {key: load_tokenizer(folder / name) for key, name in names.items()}


@pytest.fixture(scope="module")
def neox_of_the_library(published) -> library.Tokenizer:
    return library.Tokenizer.from_str(published["neox"].serialized().decode())


@pytest.mark.data
def test_gpt2_gives_its_known_ids(published):
    tokenizer = published["gpt2"]
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]
    assert tokenizer.decode([464, 2068, 7586, 21831]) == "The quick brown fox"
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.lossless) == (50257, 50256, True)
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.data
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_published_tokenizers_agree_with_the_library_on_any_text(published, neox_of_the_library, text):
    assert published["neox"].encode(text) == neox_of_the_library.encode(text, add_special_tokens=False).ids
    assert published["gpt2"].decode_bytes(published["gpt2"].encode(text)) == text.encode()


@pytest.mark.data
def test_gpt_neox_loads_and_says_that_it_normalises(published):
    tokenizer = published["neox"]
    text = "def f(x):\n        return x  # naïve <|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_text == 0
    assert not tokenizer.lossless  # it normalises to NFC
