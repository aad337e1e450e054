"""Our tokenizers in transformers: the same ids, from plain files, for texts of every kind."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from attention.covering import first_always
from polysketch.data.tokenization import BpeTokenizer, BytesTokenizer, JsonTokenizer, SentencePieceTokenizer
from polysketch.data.tokenization.sentence_pieces import LOSSLESS_SETTINGS
from polysketch.integrations.huggingface.tokenizer import PROBES, require_same_ids, to_fast_tokenizer

TEXT = "The quick brown fox, 12 naïve façades & 日本語; 🙂 over the lazy dog.\n\tTo be, or not to be?  " * 30
TRAINED = {"bytes": None, "bpe": 300, "sentencepiece": 330}


def train(kind: str, size: int | None):
    """A tokenizer of ours."""
    kinds = {"bytes": BytesTokenizer, "bpe": BpeTokenizer, "sentencepiece": SentencePieceTokenizer}
    return kinds[kind].train([TEXT], size)


@pytest.fixture(scope="module", params=TRAINED)
def pair(request, tmp_path_factory):
    """Ours, and what AutoTokenizer makes of the files."""
    ours = train(request.param, TRAINED[request.param])
    folder = tmp_path_factory.mktemp("tokenizer")
    to_fast_tokenizer(ours).save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [*PROBES, TEXT], ids=range(len(PROBES) + 1))
def test_odd_texts_have_our_ids(pair, text):
    """And come back as they were."""
    ours, theirs = pair
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \n▁<|>0xAendoftuk/s🙂é"))
def test_any_text_has_our_ids(pair, text):
    """Any characters, and strings that nearly spell special pieces."""
    ours, theirs = pair
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


def test_ends_texts_and_pads_as_the_model_was_trained(pair):
    """With the end of text, on the left."""
    ours, theirs = pair
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.end_of_text
    assert len(theirs) == ours.vocab_size
    batch = theirs(["a longer text", "a"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][1][0] == 0
    assert batch["attention_mask"][1][-1] == 1
    text = theirs.decode([*ours.encode("ab"), ours.end_of_text], skip_special_tokens=True)
    assert text == "ab"


@pytest.mark.parametrize(
    "settings", [{"normalization_rule_name": "nmt_nfkc"}, {"add_dummy_prefix": True}, {"model_type": "bpe"}]
)
def test_a_sentencepiece_model_that_would_get_other_ids_is_refused(settings):
    """Rather than exported with them."""
    import io

    import sentencepiece

    model = io.BytesIO()
    options = LOSSLESS_SETTINGS | settings
    lines = iter(TEXT.split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, vocab_size=330, **options)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    with pytest.raises(ValueError, match="normalises text or is no unigram model"):
        to_fast_tokenizer(SentencePieceTokenizer(processor, model.getvalue()))


def test_a_tokenizer_that_adds_tokens_no_longer_does(tmp_path):
    """A foreign file with a beginning-of-text template, truncation and padding: training saw none of them."""
    plain = json.loads(train("bpe", 300).serialized())
    template = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    plain["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": [*template, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    plain["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    ours = BpeTokenizer.load(tmp_path / "tokenizer.json")
    assert to_fast_tokenizer(ours)("The quick brown")["input_ids"] == ours.encode("The quick brown")


@pytest.mark.data
@pytest.mark.parametrize("vocabulary", first_always([8000, 2000]))
def test_real_text_in_sentence_pieces(outside_data, vocabulary, tmp_path):
    """A megabyte by spans of 2,000 characters, every id."""
    text = gzip.decompress((outside_data / "lm" / "tinyshakespeare.txt.gz").read_bytes()).decode()[:300_000]
    ours = SentencePieceTokenizer.train([text], vocabulary)
    theirs = to_fast_tokenizer(ours)
    spans = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    assert theirs(spans)["input_ids"] == ours.encode_batch(spans)


@pytest.mark.data
def test_a_tokenizer_of_others(outside_data, tmp_path):
    """That of GPT-NeoX, whose added tokens are runs of spaces."""
    packed = outside_data / "tokenizers" / "gptneox_20B_tokenizer.json.gz"
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    ours = BpeTokenizer.load(tmp_path / "tokenizer.json")
    to_fast_tokenizer(ours).save_pretrained(tmp_path / "saved")
    require_same_ids(ours, AutoTokenizer.from_pretrained(tmp_path / "saved"))


def test_a_tokenizer_json_that_is_no_byte_level_bpe(tmp_path):
    """WordPiece with lower case: ids are its own, also where text gets lost, and the loaded files give them too."""
    import tokenizers

    texts = ["the river and the stone", "a stone in the river, and a garden", "The garden's gate"]
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.Lowercase()
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece()
    library.train_from_iterator(
        texts, tokenizers.trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]", "[SEP]"])
    )
    library.save(str(tmp_path / "tokenizer.json"))
    ours = JsonTokenizer.load(tmp_path / "tokenizer.json", "[SEP]")
    to_fast_tokenizer(ours).save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in (*texts, "A Garden of stone 🙂", "[SEP] the"):
        assert loaded(text)["input_ids"] == ours.encode(text) != []
    assert loaded.eos_token == "[SEP]"
