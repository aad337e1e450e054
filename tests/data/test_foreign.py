"""Token files of Megatron-LM, nanoGPT and llm.c are read as they lie; these are written here byte by byte."""

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from polysketch.data import DocumentRows, PreparedData, TrainingWindows, load_tokenizer, tokens
from polysketch.data.documents import document_ends
from polysketch.data.foreign import tokenizer_of_ids
from polysketch.data.tokenization import BytesTokenizer, TokenIds

END = 999
IDS = TokenIds(1000, END)
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def texts(number: int, seed: int = 0, most: int = 60, ids: int = 900) -> list[list[int]]:
    """Documents of random ids, without ends."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, ids, generator.integers(1, most)).tolist() for _ in range(number)]


def ended(documents: Sequence[Sequence[int]]) -> list[int]:
    """The ids of documents, each with its end."""
    return [index for document in documents for index in (*document, END)]


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8, modes: bool = False
) -> None:
    """Documents of sequences of ids, as Megatron-LM's mmap format has them."""
    sequences = [sequence for document in documents for sequence in document]
    flat = [index for sequence in sequences for index in sequence]
    prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(flat)}{FORMATS[code]}", *flat))
    size = struct.calcsize(f"<{FORMATS[code]}")
    pointers = [size * sum(map(len, sequences[:number])) for number in range(len(sequences))]
    bounds = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_name(prefix.name + ".idx").write_bytes(index + bytes(len(sequences) if modes else 0))


def write_llmc(path: Path, ids: Sequence[int], magic: int = 20240520, version: int = 1) -> None:
    """Ids behind llm.c's header."""
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(ids)}{'I' if magic == 20240801 else 'H'}", *ids))


def write_nanogpt(path: Path, ids: Sequence[int]) -> None:
    """Ids of two bytes."""
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))


def ids_of(data: PreparedData, split: str) -> list[int]:
    return np.asarray(data.split(split).tokens).tolist()


def spans(batch) -> list[tuple[list[int], list[int]]]:
    """The ids and targets of each document of a batch, without padding."""
    bounds = batch.cu_seqlens.tolist()
    pieces = [
        (batch.ids[0, start:stop].tolist(), batch.targets[0, start:stop].tolist())
        for start, stop in itertools.pairwise(bounds)
    ]
    return sorted(piece for piece in pieces if piece[1][0] != -100)


def rows_of(data: PreparedData, context: int = 64) -> list[tuple[list[int], list[int]]]:
    """All documents of an epoch."""
    rows = DocumentRows(data.split("train").tokens, context, 0, data.description.end_of_text)
    return spans(rows.batch(0, rows.num_rows))


# Megatron-LM


@pytest.mark.parametrize("code", FORMATS)
@pytest.mark.parametrize("modes", [False, True])
def test_a_pair_of_megatron_is_read_in_every_type_of_ids(tmp_path, code, modes):
    documents = texts(50, ids=100)
    write_megatron(tmp_path / "train_text_document", [[document] for document in documents], code, modes)
    for path in (tmp_path, tmp_path / "train_text_document", tmp_path / "train_text_document.idx"):
        data = PreparedData.open(path, IDS)
        assert ids_of(data, "train") == [index for document in documents for index in document]
        split = data.split("train")
        assert (split.num_documents, split.num_tokens) == (50, sum(map(len, documents)))
        assert data.description.layout == "Megatron-LM"


def test_its_documents_are_kept_apart_with_an_end_of_text_and_without(tmp_path):
    documents = texts(40)
    for name, end in (("with", [END]), ("without", [])):
        (tmp_path / name).mkdir()
        write_megatron(tmp_path / name / "train", [[[*document, *end]] for document in documents], 4)
    found = rows_of(PreparedData.open(tmp_path / "without", IDS))
    assert found == sorted((document[:-1], document[1:]) for document in documents if len(document) > 1)
    found = rows_of(PreparedData.open(tmp_path / "with", IDS))
    assert found == sorted((document, [*document[1:], END]) for document in documents)


def test_a_document_of_several_sequences_is_one(tmp_path):
    documents = [texts(number, seed=number, most=9) for number in (1, 3, 2, 5)]
    write_megatron(tmp_path / "train", documents)
    whole = [[index for sequence in document for index in sequence] for document in documents]
    found = rows_of(PreparedData.open(tmp_path, IDS))
    assert found == sorted((document[:-1], document[1:]) for document in whole if len(document) > 1)


def test_empty_documents_and_sequences_are_none(tmp_path):
    documents = [[], [[1, 2, 3]], [], [[], [4, 5], []], [[]], [[6, 7]], []]
    write_megatron(tmp_path / "train", documents)
    assert rows_of(PreparedData.open(tmp_path, IDS)) == [([1, 2], [2, 3]), ([4], [5]), ([6], [7])]


@pytest.mark.parametrize("at_a_time", [1, 7, 64, 10_000])
def test_ends_are_those_of_the_index_however_many_are_looked_at(tmp_path, at_a_time):
    documents = texts(80, most=20)
    write_megatron(tmp_path / "train_a", [[document] for document in documents[:50]])
    write_megatron(tmp_path / "train_b", [[document] for document in documents[50:]])
    found = PreparedData.open(tmp_path, IDS).split("train").tokens
    ends = np.cumsum([len(document) for document in documents]) - 1
    parts = [
        document_ends(found, start, min(start + at_a_time, len(found)), END)
        for start in range(0, len(found), at_a_time)
    ]
    assert np.array_equal(np.concatenate(parts), ends)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: b"TNTIDX\x00\x00" + index[8:], "found fairseq's"),
        (lambda index: b"PK" + index[2:], r"beginning with MMIDIDX\) in .*train\.idx, found b'PK"),
        (lambda index: index[:20], r"beginning with MMIDIDX"),
        (lambda index: index[:9] + struct.pack("<Q", 2) + index[17:], "expected version 1 .* found 2"),
        (lambda index: index[:17] + b"\x07" + index[18:], r"8 \(uint16\) in .*train\.idx, found code 7"),
        (lambda index: index[:-1], "cut short or altered"),
        (lambda index: index + bytes(3), "cut short or altered"),
        (lambda index: index[:34] + struct.pack("<i", 99) + index[38:], "gaps or overlaps"),
        (lambda index: index[:34] + struct.pack("<i", -1) + index[38:], "gaps or overlaps"),
        (lambda index: index[:-8] + struct.pack("<q", 1), "documents from the first sequence to the last"),
        (
            lambda index: index[:-16] + struct.pack("<q", 99) + index[-8:],
            "documents from the first sequence to the last",
        ),
    ],
)
def test_another_index_is_refused_in_one_line(tmp_path, change, message):
    write_megatron(tmp_path / "train", [[document] for document in texts(10)])
    path = tmp_path / "train.idx"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        PreparedData.open(tmp_path, IDS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_of_a_pair_is_named(tmp_path, suffix):
    for name in ("train", "val"):
        write_megatron(tmp_path / name, [[[1, 2]]])
    (tmp_path / f"train{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"as Megatron-LM writes them, found no .*train\{suffix}"):
        PreparedData.open(tmp_path, IDS)


@pytest.mark.parametrize("change", [-2, -1, 2])
def test_tokens_that_do_not_belong_to_the_index_are_named(tmp_path, change):
    write_megatron(tmp_path / "train", [[document] for document in texts(10)])
    path = tmp_path / "train.bin"
    contents = path.read_bytes()
    path.write_bytes(contents[:change] if change < 0 else contents + bytes(change))
    with pytest.raises(ValueError, match=rf"expected {len(contents)} bytes in .*train\.bin, found"):
        PreparedData.open(tmp_path, IDS)


# nanoGPT and llm.c


def test_nanogpts_folder_is_read(tmp_path):
    train, val = ended(texts(30)), ended(texts(5, seed=1))
    write_nanogpt(tmp_path / "train.bin", train)
    write_nanogpt(tmp_path / "val.bin", val)
    (tmp_path / "meta.pkl").write_bytes(b"never read")
    data = PreparedData.open(tmp_path, IDS)
    assert (ids_of(data, "train"), ids_of(data, "validation")) == (train, val)
    assert set(data.description.splits) == {"train", "validation"}
    assert data.description.layout == "nanoGPT"
    assert rows_of(data) == sorted((document, [*document[1:], END]) for document in texts(30))


@pytest.mark.parametrize(("magic", "version"), [(20240520, 1), (20240801, 7)])
def test_llmcs_shards_are_one_sequence_in_the_order_of_their_names(tmp_path, magic, version):
    train = [END, *ended(texts(200))[:-1]]  # llm.c puts the end before each document
    cuts = [0, 700, 1501, 3000, len(train)]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts), start=1):
        write_llmc(tmp_path / f"fineweb_train_{number:06}.bin", train[start:stop], magic, version)
    write_llmc(tmp_path / "fineweb_val_000000.bin", [END, 1, 2, 3], magic, version)
    for path in (tmp_path, tmp_path / "fineweb"):
        data = PreparedData.open(path, IDS)
        assert ids_of(data, "train") == train
        assert ids_of(data, "validation") == [END, 1, 2, 3]
        assert data.description.layout == "llm.c"
        assert len(data.description.splits["train"].shards) == 4
    whole = DocumentRows(np.array(train), 64, 0, END)
    assert rows_of(data) == spans(whole.batch(0, whole.num_rows))
    windows = [TrainingWindows(each, 100, 1) for each in (np.array(train), data.split("train").tokens)]
    for step in range(20):
        assert torch.equal(windows[0].batch(step, 3), windows[1].batch(step, 3))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (struct.pack("<256i", 20240520, 2, 4, *[0] * 253) + bytes(8), "version 1 of 20240520.* found version 2"),
        (struct.pack("<256i", 20240522, 1, 4, *[0] * 253) + bytes(8), "multiple-choice questions"),
        (
            struct.pack("<256i", 20240520, 1, 5, *[0] * 253) + bytes(8),
            r"expected 1034 bytes in .*train\.bin, found 1032",
        ),
        (struct.pack("<256i", 20240520, 1, 0, *[0] * 253), "positive number of tokens"),
        (b"", "ids of two bytes each .* found 0 bytes"),
        (b"odd", "ids of two bytes each .* found 3 bytes"),
        (struct.pack("<900I", *range(900)), "probably ids of four or eight bytes"),
        (struct.pack("<900q", *range(900)), "probably ids of four or eight bytes"),
        (b"\x93NUMPY\x01\x00" + bytes(2000), "an array of NumPy"),
        (b"PK\x03\x04" + bytes(2000), "a zip archive"),
        (b"\x1f\x8b\x08\x00" + bytes(2000), "compressed by gzip"),
        (b"PAR1" + bytes(2000), "a Parquet file"),
        (b"MMIDIDX\x00\x00" + bytes(2001), "an index of Megatron-LM"),
    ],
)
def test_another_layout_is_refused_in_one_line_that_names_it(tmp_path, contents, message):
    (tmp_path / "train.bin").write_bytes(contents)
    with pytest.raises(ValueError, match=message) as caught:
        PreparedData.open(tmp_path, IDS)
    assert "train.bin" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_layouts_in_one_folder_are_refused(tmp_path):
    write_llmc(tmp_path / "train_1.bin", [1, 2, 3])
    write_nanogpt(tmp_path / "train_2.bin", [1, 2, 3])
    with pytest.raises(ValueError, match=r"of one layout, found those of llm.c and without a header .*train_2\.bin"):
        PreparedData.open(tmp_path, IDS)


# Splits


def test_files_without_the_name_of_a_split_are_cut_where_documents_end(tmp_path):
    documents = texts(500)
    write_nanogpt(tmp_path / "openwebtext.bin", ended(documents))
    write_megatron(tmp_path / "pile", [[document] for document in documents])
    for name in ("openwebtext.bin", "pile"):
        data = PreparedData.open(tmp_path / name, IDS)
        parts = [ids_of(data, split) for split in ("train", "validation", "test")]
        ends = np.cumsum([len(document) + (name != "pile") for document in documents])
        assert [*itertools.chain(*parts)] == (ended(documents) if name != "pile" else [*itertools.chain(*documents)])
        for bound, share in ((len(parts[0]), 0.98), (len(parts[0]) + len(parts[1]), 0.99)):
            assert bound in ends
            assert 0 <= bound - int(share * ends[-1]) <= 60
        assert data.description.splits["train"].tokens == len(parts[0])
    assert sum(data.split(split).num_documents for split in data.description.splits) == 500


def test_too_little_for_three_is_all_for_training(tmp_path):
    write_nanogpt(tmp_path / "a.bin", [1, 2, 3, 4])
    assert list(PreparedData.open(tmp_path, IDS).description.splits) == ["train"]


def test_unclear_names_are_refused(tmp_path):
    write_nanogpt(tmp_path / "train_val.bin", [1, 2])
    with pytest.raises(ValueError, match=r"name of one split in that of .*train_val\.bin, found train, val"):
        PreparedData.open(tmp_path, IDS)
    (tmp_path / "train_val.bin").unlink()
    write_nanogpt(tmp_path / "train.bin", [1, 2])
    write_nanogpt(tmp_path / "rest.bin", [1, 2])
    with pytest.raises(ValueError, match=r"of all token files or of none, found none in rest\.bin and train in train"):
        PreparedData.open(tmp_path, IDS)


def test_nothing_and_files_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a prepared folder, found nothing"):
        PreparedData.open(tmp_path / "nothing", IDS)
    (tmp_path / "text.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"found .*text\.jsonl: turn text into tokens by polysketch prepare"):
        PreparedData.open(tmp_path / "text.jsonl", IDS)


# What made the ids


def test_files_of_others_need_a_tokenizer(tmp_path):
    write_nanogpt(tmp_path / "train.bin", [1, 2])
    with pytest.raises(
        FileNotFoundError, match=r"expected description\.json in .*, or --tokenizer .* of nanoGPT there"
    ):
        PreparedData.open(tmp_path)


@pytest.mark.parametrize("name", ["unfinished.json", ".polysketch-lock"])
def test_an_unfinished_folder_is_nobody_elses(tmp_path, name):
    write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"expected description\.json in"):
        PreparedData.open(tmp_path, IDS)


def test_ids_beyond_the_vocabulary_are_found_when_they_are_read(tmp_path):
    write_nanogpt(tmp_path / "train.bin", [*range(100), 1000, *range(100)])
    found = PreparedData.open(tmp_path, IDS).split("train").tokens
    assert len(found[:100]) == 100
    for where in (slice(90, 110), np.array([[5, 100]]), 100):
        with pytest.raises(ValueError, match=r"expected token ids from 0 to 999 in .*, found 1000: .*vocabulary size"):
            found[where]
    with pytest.raises(ValueError, match="found 1000"):
        DocumentRows(found, 16, 0, END)
    write_megatron(tmp_path / "negative", [[[1, 2, -3]]], 4)
    with pytest.raises(ValueError, match="found -3"):
        np.asarray(PreparedData.open(tmp_path / "negative", IDS).split("train").tokens)


def test_without_an_end_of_text_one_more_id_stands_for_it(tmp_path):
    write_nanogpt(tmp_path / "train.bin", [*range(10)] * 20)
    data = PreparedData.open(tmp_path, TokenIds(10))
    assert (data.tokenizer.vocab_size, data.description.end_of_text) == (11, 10)
    assert sum(len(ids) for ids, _ in rows_of(data)) == 199  # one document


@pytest.mark.parametrize("ids", [TokenIds(300), TokenIds(300, 0), TokenIds(300, 299)])
def test_what_stands_for_a_tokenizer_survives_a_run_folder(tmp_path, ids):
    write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    (tmp_path / "run").mkdir()
    PreparedData.open(tmp_path, ids).copy_tokenizer(tmp_path / "run")
    again = load_tokenizer(tmp_path / "run")
    assert (again.sha256, again.vocab_size, again.end_of_text) == (ids.sha256, ids.vocab_size, ids.end_of_text)
    assert len({TokenIds(300).sha256, TokenIds(300, 0).sha256, TokenIds(300, 299).sha256, TokenIds(301).sha256}) == 4
    assert again.token_bytes().sum() == 0
    with pytest.raises(ValueError, match="expected a tokenizer to encode text, found ids"):
        again.encode("text")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("bytes", 300, None), "--tokenizer or --vocab-size, found both"),
        ((None, None, "5"), "--end-of-text: expected --tokenizer or --vocab-size beside it"),
        ((None, 300, "<end>"), "expected an id beside --vocab-size, found '<end>'"),
        ((None, 300, "300"), "end of text from 0 to 299, found 300"),
        ((None, 1, None), "at least 2 ids, found 1"),
    ],
)
def test_what_does_not_say_what_made_the_ids_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_of_ids(*given)


def test_what_made_the_ids_is_a_tokenizer_or_a_number(tmp_path, tokenizers):
    tokenizers["bpe"].save(tmp_path)
    assert tokenizer_of_ids(None, None, None) is None
    assert isinstance(tokenizer_of_ids("bytes", None, None), BytesTokenizer)
    assert tokenizer_of_ids(str(tmp_path / "tokenizer.json"), None, None).sha256 == tokenizers["bpe"].sha256
    assert tokenizer_of_ids(None, 50_257, "50256").end_of_text == 50_256


# What is copied and what is not


def test_nothing_is_copied_and_no_more_is_mapped_than_is_read(tmp_path, monkeypatch):
    for number in range(4):
        write_llmc(tmp_path / f"train_{number}.bin", [number] * 2000)
    mapped = []
    original = tokens.TokenFile.map
    monkeypatch.setattr(tokens.TokenFile, "map", lambda self: mapped.append(self.path.name) or original(self))
    found = PreparedData.open(tmp_path, IDS).split("train").tokens
    assert mapped == []
    part = found[2500:2600]
    assert mapped == ["train_1.bin"]
    assert isinstance(part, np.memmap)
    assert part.base is not None


def test_the_fingerprint_is_that_of_the_contents_wherever_they_lie(tmp_path):
    fingerprints = []
    for folder, ids in (("a", [1, 2, 3]), ("b", [1, 2, 3]), ("c", [1, 2, 4])):
        (tmp_path / folder).mkdir()
        write_nanogpt(tmp_path / folder / "train.bin", ids)
        fingerprints.append(PreparedData.open(tmp_path / folder, IDS).sha256)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert PreparedData.open(tmp_path / "a", TokenIds(1001)).sha256 != fingerprints[0]


def test_a_prepared_folder_is_still_one(corpus_folder, tmp_path):
    from polysketch.data import prepare

    data = prepare(corpus_folder, "bytes", tmp_path / "out", validation_share=0.2, test_share=0.2, progress=False)
    assert PreparedData.open(tmp_path / "out", IDS).description == data.description
    assert data.description.layout is None
