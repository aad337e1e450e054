"""`polysketch task`: folders of tasks, and one line for what cannot be."""

import json
from pathlib import Path

import numpy as np
import pytest

from polysketch.cli import main
from polysketch.tasks import open_task, write_task
from polysketch.tasks.reversal import Reversal
from tasks.test_task_folders import PAIRS, pair_table, pathfinder_folder


def reviews(path: Path, count: int) -> Path:
    lines = [json.dumps({"text": f"text {number}", "label": number % 2}) for number in range(count)]
    path.write_text("\n".join(lines))
    return path


def test_sizes_are_listed_and_set(tmp_path: Path, capsys):
    assert main(["task", "reversal"]) == 0
    assert "--set symbols=10" in capsys.readouterr().out
    out = tmp_path / "reversal"
    assert main(["task", "reversal", "--set", "length=7", "asks=written", "seed=3", "--out", str(out)]) == 0
    assert "endless train, endless validation, endless test rows of up to 7 tokens, 11 ids" in capsys.readouterr().out
    assert open_task(out) == Reversal(length=7, asks="written", seed=3)


def test_texts_get_a_validation_split_unless_there_is_one(tmp_path: Path, capsys):
    file = reviews(tmp_path / "reviews.jsonl", 40)
    sources = ["--train", str(file), "--test", str(file), "--max-tokens", "6"]
    assert main(["task", "texts", *sources, "--out", str(tmp_path / "a")]) == 0
    assert "38 train, 2 validation, 40 test rows of up to 6 tokens, 257 ids" in capsys.readouterr().out
    assert main(["task", "texts", *sources, "--validation", str(file), "--out", str(tmp_path / "b")]) == 0
    assert [open_task(tmp_path / "b").num_rows(split) for split in ("train", "validation", "test")] == [40, 40, 40]


def test_symbols_and_images_are_read(tmp_path: Path, capsys):
    table = tmp_path / "lists.tsv"
    table.write_text("".join(f"{value}\t( [MAX {value} ] )\n" for value in range(10)) * 2)
    assert main(["task", "texts", "--train", str(table), "--tokenizer", "symbols", "--out", str(tmp_path / "a")]) == 0
    assert "rows of up to 3 tokens, 13 ids; asks: one of 10 classes" in capsys.readouterr().out
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3073), np.uint8)
    pixels[:, 0] = np.arange(20) % 10
    (tmp_path / "batch.bin").write_bytes(pixels.tobytes())
    assert main(["task", "images", "--train", str(tmp_path / "batch.bin"), "--out", str(tmp_path / "b")]) == 0
    assert "19 train, 1 validation rows of up to 3,072 tokens, 256 ids" in capsys.readouterr().out
    arguments = ["task", "images", "--train", str(tmp_path / "batch.bin"), "--patch", "8", "--out", str(tmp_path / "c")]
    assert main(arguments) == 0
    assert "rows of up to 16 tokens, 256 ids; asks: one of 10 classes of a picture" in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        write_task(open_task(tmp_path / "c"), tmp_path / "c")
    found = open_task(tmp_path / "c")
    assert (found.asks, found.image_size, found.patch_size, found.longest) == ("picture", (32, 32, 3), 8, 16)


def test_digits_come_with_a_package(tmp_path: Path, capsys):
    pytest.importorskip("sklearn")
    assert main(["task", "digits", "--patch", "2", "--out", str(tmp_path / "digits")]) == 0
    assert "1,365 train, 72 validation, 360 test rows of up to 16 tokens" in capsys.readouterr().out
    pixels = open_task(tmp_path / "digits").rows("test", np.arange(360)).inputs["pixels"]
    assert (pixels.shape, int(pixels.max())) == ((360, 64), 255)


def test_labels_and_sequences_are_folders_too(tmp_path: Path, capsys):
    (tmp_path / "names.conll").write_text("Ada NAME\nmet O\n\n" * 20)
    file = str(tmp_path / "names.conll")
    assert main(["task", "words", "--train", file, "--test", file, "--out", str(tmp_path / "a")]) == 0
    told = capsys.readouterr().out
    assert (
        "19 train, 1 validation, 20 test rows of up to 8 tokens, 257 ids; asks: one of 2 labels for each word" in told
    )
    lines = [json.dumps({"words": ["a", "b"], "tags": [0, 1], "in": "a b", "out": "b"})] * 20
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    fields = ["--text-field", "words", "--class-field", "tags"]
    assert main(["task", "words", "--train", str(tmp_path / "rows.jsonl"), *fields, "--out", str(tmp_path / "b")]) == 0
    assert open_task(tmp_path / "b").class_names == ("0", "1")
    fields = ["--source-field", "in", "--target-field", "out"]
    arguments = ["task", "sequences", "--train", str(tmp_path / "rows.jsonl"), *fields]
    assert main([*arguments, "--out", str(tmp_path / "c")]) == 0
    assert "19 train, 1 validation rows of up to 3 tokens, 257 ids; asks: a sequence" in capsys.readouterr().out
    assert open_task(tmp_path / "c").row("train", 0).answer.tolist() == [ord("b"), 256]
    assert main([*arguments, "--tokenizer", "symbols", "--out", str(tmp_path / "d")]) == 0
    assert open_task(tmp_path / "d").row("train", 0).answer.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copying"], "expected a task of selective-copying, induction"),
        (["texts"], "texts: expected --out"),
        (["texts", "--out", "OUT"], "texts: expected --train"),
        (["texts", "--train", "nowhere.jsonl", "--out", "OUT"], "found nothing at nowhere.jsonl"),
        (["texts", "--train", "x", "--set", "length=3", "--out", "OUT"], "expected no --set"),
        (["texts", "--train", "x", "--patch", "2", "--out", "OUT"], "texts: expected no --patch"),
        (["reversal", "--patch", "2", "--out", "OUT"], "expected no --patch"),
        (["digits", "--train", "x", "--out", "OUT"], "digits: expected no --train"),
        (["digits", "--patch", "3", "--out", "OUT"], "images of 8 x 8 pixels, of a side of 1, 2, 4, 8, found 3"),
        (["digits", "--patch", "0", "--out", "OUT"], "images of 8 x 8 pixels, of a side of 1, 2, 4, 8, found 0"),
        (["reversal", "--train", "x", "--out", "OUT"], "expected no --train"),
        (["reversal", "--max-tokens", "5", "--out", "OUT"], "reversal: expected no --max-tokens"),
        (["reversal", "--seed", "5"], "reversal: expected no --seed"),
        (["images", "--train", "x", "--tokenizer", "y", "--out", "OUT"], "images: expected no --tokenizer"),
        (["pairs", "--train", "x", "--class-names", "y", "--out", "OUT"], "pairs: expected no --class-names"),
        (["pairs", "--train", "x.tsv", "--out", "OUT"], "expected a file, found none at x.tsv"),
        (["words", "--train", "x.conll", "--out", "OUT"], "no such file or directory: x.conll"),
        (["words", "--train", "x", "--source-field", "y", "--out", "OUT"], "words: expected no --source-field"),
        (["sequences", "--train", "x.tsv", "--out", "OUT"], "no such file or directory: x.tsv"),
        (["sequences", "--train", "x", "--text-field", "y", "--out", "OUT"], "sequences: expected no --text-field"),
        (["pathfinder", "--train", "x", "--out", "OUT"], "expected Pathfinder's metadata"),
        (["reversal", "--set", "size=3", "--out", "OUT"], "with one of seed, examples, asks"),
        (["reversal", "--set", "length=ten", "--out", "OUT"], "a value such as int has"),
        (["reversal", "--set", "length=0", "--out", "OUT"], "a length of at least 1"),
    ],
)
def test_what_cannot_be_is_told_in_one_line_and_writes_nothing(arguments, message: str, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert main(["task", *[str(out) if word == "OUT" else word for word in arguments]]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not out.exists()


def test_few_classes_are_named(tmp_path: Path, capsys):
    """And many are counted."""
    for classes, told in ((("bad", "good"), "one of 2 classes (bad, good)\n"), ("abcdefgh", "one of 8 classes\n")):
        table = tmp_path / f"{len(classes)}.tsv"
        table.write_text("".join(f"{name}\ta text\n" for name in classes) * 6)
        assert main(["task", "texts", "--train", str(table), "--out", str(tmp_path / f"{len(classes)}")]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(told.strip())


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["task", "reversal", "--out", str(tmp_path)]) == 1
    assert "with contents" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_pairs_and_pathfinder_are_folders_too(tmp_path: Path, capsys):
    table = pair_table(tmp_path / "pairs.tsv", PAIRS * 5)
    assert main(["task", "pairs", "--train", str(table), "--out", str(tmp_path / "a")]) == 0
    assert "19 train, 1 validation rows of up to 11 tokens, 257 ids; asks: one of 2 classes for two documents" in (
        capsys.readouterr().out
    )
    folder, _ = pathfinder_folder(tmp_path / "pathfinder")
    sources = [str(folder)] * 2
    assert main(["task", "pathfinder", "--train", *sources, "--out", str(tmp_path / "b")]) == 0
    assert "8 train, 1 validation, 1 test rows of up to 64 tokens, 256 ids" in capsys.readouterr().out
