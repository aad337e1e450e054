"""`polysketch train` and `evaluate` read token files that others made as they lie."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from polysketch.cli import main
from polysketch.training import load_model

SIZES = ["--layers", "1", "--context", "32", "--batch-size", "2", "--threads", "1", "--device", "cpu"]
RHYTHM = ["--steps", "2", "--log-every", "1", "--eval-every", "2", "--eval-tokens", "60", "--no-tensorboard"]
KIND = ["--attention", "softmax"]
TEXT = "Näive façade, 10 € — 日本語. The quick brown fox jumps over the lazy dog.\n"
END = 256
WHOLE = ["--validation-share", "0", "--test-share", "0"]


def ids(repeats: int) -> list[int]:
    return [*TEXT.encode(), END] * repeats


def write_shards(folder: Path) -> Path:
    """llm.c's shards, two for training and one for validation, in the ids of bytes."""
    folder.mkdir(parents=True)
    for name, part in (("train_000001", ids(7)[:300]), ("train_000002", ids(7)[300:]), ("val_000000", ids(3))):
        header = struct.pack("<256i", 20240520, 1, len(part), *[0] * 253)
        (folder / f"text_{name}.bin").write_bytes(header + struct.pack(f"<{len(part)}H", *part))
    return folder


def write_pair(folder: Path) -> Path:
    """Megatron-LM's pair without a split in its name, documents without ends of text."""
    folder.mkdir(parents=True)
    documents = [list(f"{number} {TEXT}".encode()) for number in range(300)]
    flat = [index for document in documents for index in document]
    (folder / "pile_text_document.bin").write_bytes(struct.pack(f"<{len(flat)}i", *flat))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 300, 301) + struct.pack("<300i", *map(len, documents))
    starts = [4 * sum(map(len, documents[:number])) for number in range(300)]
    index += struct.pack("<300q", *starts) + struct.pack("<301q", *range(301))
    (folder / "pile_text_document.idx").write_bytes(index)
    return folder / "pile_text_document"


def train(data: Path, run: Path, *more: str) -> int:
    return main(["train", "--data", str(data), "--out", str(run), *SIZES, *RHYTHM, *KIND, *more])


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def figures(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *arguments, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_shards_train_as_prepared_text_of_the_same_tokens_does(tmp_path, capsys):
    shards = write_shards(tmp_path / "shards")
    for split, repeats in (("train", 7), ("validation", 3)):
        (tmp_path / "text" / split).mkdir(parents=True)
        for number in range(repeats):
            (tmp_path / "text" / split / f"{number}.txt").write_text(TEXT, encoding="utf-8")
    assert main(["prepare", str(tmp_path / "text"), "--out", str(tmp_path / "prepared"), "--no-progress"]) == 0
    assert train(shards, tmp_path / "run", "--tokenizer", "bytes") == 0
    assert train(tmp_path / "prepared", tmp_path / "own") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "own")
    found = figures(capsys, str(tmp_path / "run"), "--split", "validation")
    assert found["num_bytes"] == 3 * len(TEXT.encode()) - 1  # the first is not predicted
    for data in (shards, tmp_path / "prepared"):
        again = figures(capsys, str(tmp_path / "own"), "--split", "validation", "--data", str(data))
        assert again["loss"] == found["loss"]
        assert again["bits_per_byte"] == found["bits_per_byte"]
    assert load_model(tmp_path / "run")[1].tokenizer.encode("a") == [97]


def test_ids_alone_train_and_evaluate(tmp_path, capsys):
    pair = write_pair(tmp_path / "pair")
    assert train(pair, tmp_path / "run", "--vocab-size", "256") == 0
    found = figures(capsys, str(tmp_path / "run"), "--split", "test")
    assert found["bits_per_byte"] is None
    assert found["num_tokens"] > 100
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--device", "cpu"]) != 0
    assert "the model was trained on token ids alone" in capsys.readouterr().err


def test_a_run_goes_on_from_another_folder_with_its_own_copy_of_the_tokenizer(tmp_path, monkeypatch, capsys):
    shards = write_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 40, encoding="utf-8")
    assert main(["prepare", "text.txt", "--tokenizer", "bpe:300", "--out", "mine", "--no-progress", *WHOLE]) == 0
    assert train(shards, tmp_path / "run", "--tokenizer", "mine") == 0
    monkeypatch.chdir(tmp_path / "run")
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--extend", "--steps", "3"]) == 0
    assert losses(tmp_path / "run")[-1] > 0


def test_a_run_goes_on_with_the_same_files_elsewhere_and_with_no_others(tmp_path, capsys):
    shards = write_shards(tmp_path / "shards")
    assert train(shards, tmp_path / "run", "--tokenizer", "bytes") == 0
    shutil.move(shards, tmp_path / "moved")
    more = ["--tokenizer", "bytes", "--resume", "--extend", "--steps", "3"]
    assert train(tmp_path / "moved", tmp_path / "run", *more) == 0
    path = tmp_path / "moved" / "text_train_000002.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\x00\x00")
    capsys.readouterr()
    assert train(tmp_path / "moved", tmp_path / "run", *more, "--steps", "4") != 0
    assert "expected the data the run was started with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "or --tokenizer or --vocab-size for the token files of llm.c there, which polysketch did not prepare"),
        (["--tokenizer", "bytes", "--vocab-size", "300"], "expected --tokenizer or --vocab-size, found both"),
        (["--vocab-size", "200"], "expected token ids from 0 to 200 in"),
        (["--tokenizer", "nowhere.json"], "nothing at nowhere.json"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys, more, message):
    shards = write_shards(tmp_path / "shards")
    assert train(shards, tmp_path / "run", *more) != 0
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "Traceback" not in error


def test_a_prepared_folder_has_its_own_tokenizer(data_folder, tmp_path, capsys):
    assert train(data_folder, tmp_path / "run", "--tokenizer", "bytes") != 0
    assert "--tokenizer: expected token files that polysketch did not prepare" in capsys.readouterr().err


def test_without_validation_the_run_says_so_before_it_starts(tmp_path, capsys):
    shards = write_shards(tmp_path / "shards")
    (shards / "text_val_000000.bin").unlink()
    assert train(shards, tmp_path / "run", "--tokenizer", "bytes") != 0
    assert "expected a validation split" in capsys.readouterr().err
    assert train(shards, tmp_path / "run", "--tokenizer", "bytes", "--eval-every", "0") == 0
