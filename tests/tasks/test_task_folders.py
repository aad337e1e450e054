"""Tasks as folders, and rows out of local files."""

import codecs
import csv
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from polysketch.data.tokenization import BytesTokenizer
from polysketch.tasks import TASKS, TaskBatch, open_task, task_class, task_digest, verify_task, write_task
from polysketch.tasks.batch import Row, collated
from polysketch.tasks.images import classified_images, pathfinder
from polysketch.tasks.sources import classified_pairs, classified_texts, split_off
from tasks.test_generated_tasks import SMALL

TEXTS = [("one good film", "pos"), ("bad", "neg"), ("very good", "pos"), ("no", "neg"), ("dull and long", "neg")]


def equal(one: TaskBatch, other: TaskBatch) -> bool:
    same = all(one.inputs[name].equal(other.inputs[name]) for name in {*one.inputs, *other.inputs})
    return same and one.answers.equal(other.answers)


def json_lines(path: Path, rows, **names: str) -> Path:
    text, label = names.get("text", "text"), names.get("label", "label")
    lines = "".join(json.dumps({text: x, label: y}) + "\n\n" for x, y in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def texts(tmp_path: Path, **options):
    file = json_lines(tmp_path / "train.jsonl", TEXTS)
    return classified_texts({"train": [file], "test": [file]}, BytesTokenizer().encode, 257, **options)


@pytest.mark.parametrize("name", TASKS)
def test_a_generated_task_comes_back_from_its_folder(name: str, tmp_path: Path):
    task = task_class(name)(**SMALL[name], seed=5)
    write_task(task, tmp_path / "task")
    assert [path.name for path in (tmp_path / "task").iterdir()] == ["task.json"]
    found = open_task(tmp_path / "task")
    assert found == task
    assert equal(found.rows("test", np.arange(3)), task.rows("test", np.arange(3)))
    with pytest.raises(FileExistsError):
        write_task(task, tmp_path / "task")


def test_classified_texts_come_back_from_their_folder(tmp_path: Path):
    task = texts(tmp_path, max_tokens=9)
    write_task(task, tmp_path / "task")
    found = open_task(tmp_path / "task")
    for split in ("train", "test"):
        assert equal(found.rows(split, np.arange(5)), task.rows(split, np.arange(5)))
    assert (found.num_classes, found.class_names, found.longest, found.num_rows("validation")) == (
        2,
        ("neg", "pos"),
        9,
        0,
    )
    batch = found.rows("train", np.array([0, 1]))
    assert bytes(batch.inputs["ids"][0].tolist()) == b"one good "
    assert batch.answers.tolist() == [1, 0]
    assert batch.inputs["key_mask"].sum(1).tolist() == [9, 3]
    verify_task(tmp_path / "task")


def test_layouts_of_one_content_give_the_same_rows(tmp_path: Path):
    expected = texts(tmp_path).rows("train", np.arange(5))
    named = json_lines(tmp_path / "named.jsonl.gz", TEXTS, text="review", label="sentiment")
    encode = BytesTokenizer().encode
    found = classified_texts({"train": [named]}, encode, 257, text_field="review", class_field="sentiment")
    assert equal(found.rows("train", np.arange(5)), expected)
    commas = tmp_path / "named.csv"
    with commas.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
            [("id", "sentiment", "review"), *((0, b, a) for a, b in TEXTS)]
        )
    found = classified_texts({"train": [commas]}, encode, 257, text_field="review", class_field="sentiment")
    assert equal(found.rows("train", np.arange(5)), expected)
    table, swapped = tmp_path / "plain.tsv", tmp_path / "lra.tsv"
    table.write_text("".join(f"{label}\t{text}\n" for text, label in TEXTS))
    swapped.write_text("Source\tTarget\n" + "".join(f"{text}\t{label}\n" for text, label in TEXTS))
    headed, sentences = tmp_path / "headed.tsv", tmp_path / "sentences.tsv"
    headed.write_text("Label\tText\n" + table.read_text())
    sentences.write_text(swapped.read_text().replace("Source\tTarget", "sentence\tclass"))
    for file in (table, swapped, headed, sentences, tmp_path / "train.jsonl"):
        assert equal(classified_texts({"train": [file]}, encode, 257).rows("train", np.arange(5)), expected), file
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
        assert equal(classified_texts({"train": [file]}, encode, 257).rows("train", np.arange(5)), expected)
    for number, (text, label) in enumerate(TEXTS):
        folder = tmp_path / "folders" / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text(text, "utf-8-sig" if number else "utf-8")
    found = classified_texts({"train": [tmp_path / "folders"]}, encode, 257).rows("train", np.array([3, 0, 4, 1, 2]))
    assert equal(found, expected)


def test_folders_hold_classes_and_text_files_alone(tmp_path: Path):
    """Not reviews without a class, what editors leave behind, or a class without a text."""
    for name in ("neg", "pos", "unsup", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0_3.txt").write_text(name)
    for name in ("0_3.txt~", "1_3.txt.swp", "notes.md"):
        (tmp_path / "pos" / name).write_text("a draft")
    (tmp_path / "neg" / "1_2.txt.gz").write_bytes(gzip.compress(b"worse"))
    task = classified_texts({"train": [tmp_path]}, BytesTokenizer().encode, 257)
    assert task.class_names == ("neg", "pos")
    assert [bytes(task.row("train", i).ids.astype("u1")) for i in range(task.num_rows("train"))] == [
        b"neg",
        b"worse",
        b"pos",
    ]
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"void: expected text files \(.txt\) of a class, found none"):
        classified_texts({"train": [tmp_path]}, BytesTokenizer().encode, 257)


@pytest.mark.parametrize(
    ("labels", "names"), [((10, 9, 0, -1), ("-1", "0", "9", "10")), (("10", "9", "x"), ("10", "9", "x"))]
)
def test_whole_numbers_are_classes_in_their_order(labels, names, tmp_path: Path):
    file = json_lines(tmp_path / "train.jsonl", [("text", label) for label in labels])
    assert classified_texts({"train": [file]}, BytesTokenizer().encode, 257).class_names == names
    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"{label}\tA\tB\tone\tother\n" for label in labels))
    assert classified_pairs({"train": [table]}, BytesTokenizer().encode, 257).class_names == names


def test_symbols_have_an_id_each_and_parentheses_none(tmp_path: Path):
    file = tmp_path / "lists.tsv"
    file.write_text("0\t( ( ( [MIN 3 ) 0 ) ] )\n7\t( ( [MAX 7 ) ] )\n")
    task = classified_texts({"train": [file]}, None)
    assert task.row("train", 0).ids.tolist() == [5, 2, 1, 6]
    assert task.row("train", 1).ids.tolist() == [4, 3, 6]
    assert task.vocab_size == 7
    other = tmp_path / "other.tsv"
    other.write_text("0\t( ( [SM 3 ) ] )\n")
    with pytest.raises(ValueError, match=r"other.tsv:1: .*found '\[SM'"):
        classified_texts({"train": [file], "test": [other]}, None)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_images_are_their_pixels_in_both_layouts(tmp_path: Path):
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (6, 5, 4), np.uint8), np.array([0, 2, 1, 1, 0, 2], np.uint8)
    (tmp_path / "images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "labels-idx1-ubyte").write_bytes(idx(labels))
    task = classified_images({"train": [tmp_path / "images-idx3-ubyte.gz", tmp_path / "labels-idx1-ubyte"]})
    assert task.shape == (5, 4, 1)
    assert task.num_classes == 3
    assert (task.row("train", 4).ids.reshape(5, 4) == images[4]).all()
    assert task.row("train", 1).answer == 2
    colours = generator.integers(0, 256, (3, 3, 32, 32), np.uint8)
    rows = [bytes([label]) + image.tobytes() for label, image in zip((7, 0, 9), colours, strict=True)]
    (tmp_path / "data_batch_1.bin").write_bytes(rows[0])
    (tmp_path / "data_batch_2.bin").write_bytes(rows[1] + rows[2])
    task = classified_images({"train": [tmp_path / "data_batch_1.bin", tmp_path / "data_batch_2.bin"]})
    assert task.shape == (32, 32, 3)
    assert task.num_classes == 10
    assert task.num_rows("train") == 3
    found = task.row("train", 2)
    assert (found.ids.reshape(32, 32, 3)[..., 1] == colours[2, 1]).all()
    assert found.answer == 9
    grey = classified_images({"train": [tmp_path / "data_batch_1.bin", tmp_path / "data_batch_2.bin"]}, grey=True)
    assert grey.shape == (32, 32, 1)
    red, green, blue = colours[2].astype(float)
    assert (abs(grey.row("train", 2).ids.reshape(32, 32) - (0.2989 * red + 0.587 * green + 0.114 * blue)) < 0.501).all()
    with pytest.raises(ValueError, match="expected images of red, green and blue"):
        classified_images({"train": [tmp_path / "images-idx3-ubyte.gz", tmp_path / "labels-idx1-ubyte"]}, grey=True)


def test_validation_rows_are_split_off_and_none_is_lost(tmp_path: Path):
    task = texts(tmp_path)
    parts = split_off(task, 0.4)
    assert (parts.num_rows("train"), parts.num_rows("validation"), parts.num_rows("test")) == (3, 2, 5)
    rows = [parts.row(split, i) for split in ("train", "validation") for i in range(parts.num_rows(split))]
    expected = [task.row("train", index) for index in range(5)]
    assert sorted((row.ids.tolist(), row.answer) for row in rows) == sorted(
        (r.ids.tolist(), r.answer) for r in expected
    )
    for share in (0.01, 1.0):
        with pytest.raises(ValueError, match="a share"):
            split_off(task, share)


def test_rows_that_are_measured_are_of_the_whole_split_and_always_the_same(tmp_path: Path):
    file = json_lines(tmp_path / "train.jsonl", [(f"text {number}", number // 100) for number in range(200)])
    task = split_off(classified_texts({"train": [file]}, BytesTokenizer().encode, 257), 0.5)
    drawn, again = (list(task.held_out("validation", 4, 10)) for _ in range(2))
    assert [len(batch) for batch in drawn] == [4, 4, 2]
    assert {label for batch in drawn for label in batch.answers.tolist()} == {0, 1}
    assert all(equal(one, other) for one, other in zip(drawn, again, strict=True))
    texts = {tuple(row.tolist()) for batch in drawn for row in batch.inputs["ids"]}
    assert len(texts) == 10
    (whole,) = task.held_out("validation", 100, 100)
    assert equal(whole, task.rows("validation", np.arange(100)))


def test_what_a_model_is_given(tmp_path: Path):
    rows = [Row(np.array([5, 6, 7]), np.array([7, 6, 5])), Row(np.array([8]), np.array([8]))]
    batch = collated(rows, "written")
    assert batch.inputs["source"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.inputs["source_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert batch.inputs["ids"].tolist() == [[0, 7, 6], [0, 8, 0]]
    assert batch.answers.tolist() == [[7, 6, 5], [8, -100, -100]]
    assert batch.num_tokens == 4
    first, second = batch.split(1)
    assert len(first) == 1
    assert second.inputs["ids"].equal(batch.inputs["ids"][1:])
    assert second.num_tokens == 1
    assert equal(batch.to(torch.device("cpu")), batch)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n", "expected an object with 'text' and 'label'"),
        ("a.jsonl", '{"text": "x", "label": null}\n', "expected a text and a class"),
        ("a.tsv", "1\t2\t3\n", "expected two columns"),
        ("a.xls", "x", "expected a .jsonl, .tsv or .csv file"),
        ("a.csv", "x", "a.csv:1: expected columns named 'text' and 'label', found 'x'"),
        ("a.csv", "text,label\ngood,1\ngood\n", "a.csv:3: expected 2 columns, found 1"),
        ("a.csv", 'text,label\ngood,1\n"good\n', "a.csv:3: expected a table whose quotes are closed"),
        ("a.tsv", "1\tgood\n", "at least two classes"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "", "label": 2}\n', "a.jsonl:2: .* at least one token"),
    ],
)
def test_other_layouts_are_refused_with_their_place(name: str, content: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        classified_texts({"train": [tmp_path / name]}, BytesTokenizer().encode, 257)


def test_texts_are_not_cut_to_nothing(tmp_path: Path):
    (tmp_path / "a.tsv").write_text("1\tgood\n2\tbad\n")
    for most in (0, -5):
        with pytest.raises(ValueError, match=f"--max-tokens: expected at least 1, found {most}"):
            classified_texts({"train": [tmp_path / "a.tsv"]}, BytesTokenizer().encode, 257, max_tokens=most)


def test_wrong_image_files_are_refused(tmp_path: Path):
    whole = idx(np.zeros((2, 3, 3), np.uint8))
    (tmp_path / "images").write_bytes(whole[:-1])
    (tmp_path / "labels").write_bytes(idx(np.zeros(2, np.uint8)))
    with pytest.raises(ValueError, match="a whole IDX file"):
        classified_images({"train": [tmp_path / "images", tmp_path / "labels"]})
    (tmp_path / "images").write_bytes(whole)
    (tmp_path / "three").write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(ValueError, match="as many labels"):
        classified_images({"train": [tmp_path / "images", tmp_path / "three"]})
    for name, array in (("none", np.zeros((0, 3, 3), np.uint8)), ("nothing", np.zeros(0, np.uint8))):
        (tmp_path / name).write_bytes(idx(array))
    with pytest.raises(ValueError, match=r"expected images, found none: .*none"):
        classified_images({"train": [tmp_path / "none", tmp_path / "nothing"]})
    (tmp_path / "batch.bin").write_bytes(bytes(3074))
    with pytest.raises(ValueError, match="rows of 3073 bytes"):
        classified_images({"train": [tmp_path / "batch.bin"]})


def test_a_damaged_folder_is_told(tmp_path: Path):
    folder = tmp_path / "task"
    with pytest.raises(FileNotFoundError, match=r"task\.json"):
        open_task(folder)
    write_task(texts(tmp_path), folder)
    digest = task_digest(folder)
    file = folder / "train.ids.bin"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match=r"train\.ids\.bin.*altered"):
        verify_task(folder)
    file.write_bytes(content[:-4])
    with pytest.raises(ValueError, match="cut short"):
        open_task(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.ids\.bin"):
        open_task(folder)
    assert task_digest(folder) == digest
    for text, message in (("{", "something else"), ('{"format": "x"}', "something else")):
        (folder / "task.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_task(folder)


PAIRS = [("0.0", "one", "another one"), ("1.0", "two and", "two"), ("1.0", "x y", "x"), ("0.0", "z", 'w "v')]


def pair_table(path: Path, rows=PAIRS) -> Path:
    path.write_text("".join(f"{label}\tA{i}\tB{i}\t{one}\t{two}\n" for i, (label, one, two) in enumerate(rows)))
    return path


def test_pairs_of_long_range_arena_come_back_from_their_folder(tmp_path: Path):
    file = pair_table(tmp_path / "new_aan_pairs.train.tsv")
    task = classified_pairs({"train": [file]}, BytesTokenizer().encode, 257, max_tokens=7, alphabet="x")
    write_task(split_off(task, 0.25), tmp_path / "task")
    found = open_task(tmp_path / "task")
    assert (found.asks, found.class_names, found.documents, found.alphabet) == ("pair", ("0.0", "1.0"), 2, "x")
    assert (found.num_rows("train"), found.num_rows("validation"), found.longest) == (3, 1, 7)
    rows = [found.row(split, i) for split in ("train", "validation") for i in range(found.num_rows(split))]
    seen = {(found.class_names[row.answer], bytes(row.ids.tolist()), bytes(row.second.tolist())) for row in rows}
    assert seen == {(label, one.encode()[:7], two.encode()[:7]) for label, one, two in PAIRS}
    batch = found.rows("train", np.arange(3))
    assert {"ids", "key_mask", "second", "second_mask"} == batch.inputs.keys()
    assert batch.inputs["second"].shape == batch.inputs["second_mask"].shape
    first, second = batch.split(2)
    assert len(second) == 1
    assert first.inputs["second"].equal(batch.inputs["second"][:2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\ta\tb\ttext\n", "a.tsv:1: expected five columns apart by tabs, .* found 4"),
        ("0\ta\tb\tx\ty\n1\ta\tb\tx\t\n", "a.tsv:2: expected a text of at least one token"),
    ],
)
def test_pairs_of_another_layout_are_refused_with_their_place(content: str, message: str, tmp_path: Path):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(ValueError, match=message):
        classified_pairs({"train": [tmp_path / "a.tsv"]}, BytesTokenizer().encode, 257)


def pathfinder_folder(path: Path) -> tuple[Path, np.ndarray]:
    """Six images, one of them without a byte; returns the others."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    for number, array in enumerate(pixels):
        folder = path / "imgs" / str(number // 3)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(array).save(folder / f"sample_{number % 3}.png")
    (path / "imgs" / "1" / "sample_1.png").write_bytes(b"")
    (path / "metadata").mkdir()
    for part in range(2):
        lines = [
            f"imgs/{part} sample_{i} {i} {(3 * part + i) % 2} 1.8 6".replace(f"_{i} ", f"_{i}.png ") for i in range(3)
        ]
        (path / "metadata" / f"{part}.npy").write_text("\n".join(lines) + "\n")
    return path, np.delete(pixels, 4, axis=0)


def test_pathfinder_is_read_by_its_metadata(tmp_path: Path):
    folder, pixels = pathfinder_folder(tmp_path / "curv_contour_length_14")
    task = pathfinder({"train": [folder]})
    assert (task.shape, task.num_classes, task.num_rows("train"), task.vocab_size) == ((8, 8, 1), 2, 5, 256)
    for number, (array, label) in enumerate(zip(pixels, [0, 1, 0, 1, 1], strict=True)):
        row = task.row("train", number)
        assert (row.ids.reshape(8, 8) == array).all()
        assert row.answer == label
    (folder / "imgs" / "0" / "sample_0.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"expected a PNG image, found something else: .*sample_0.png"):
        pathfinder({"train": [folder]})
    (folder / "imgs" / "0" / "sample_0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"0.npy:1: expected the image"):
        pathfinder({"train": [folder]})
    (folder / "metadata" / "0.npy").write_text("imgs/0 sample_1.png 1\n")
    with pytest.raises(ValueError, match=r"0.npy:1: expected a folder, a file, a number and a class"):
        pathfinder({"train": [folder]})
    with pytest.raises(FileNotFoundError, match="expected Pathfinder's metadata"):
        pathfinder({"train": [tmp_path]})


def test_a_folder_that_does_not_say_what_its_ids_are_is_read(tmp_path: Path):
    """As those that were written before it was said."""
    write_task(texts(tmp_path), tmp_path / "task")
    file = tmp_path / "task" / "task.json"
    described = json.loads(file.read_text())
    for name in ("alphabet", "documents"):
        del described["options"][name]
    file.write_text(json.dumps(described))
    found = open_task(tmp_path / "task")
    assert (found.alphabet, found.asks, found.num_rows("train")) == ("", "class", 5)
    described["options"]["size"] = 3
    file.write_text(json.dumps(described))
    with pytest.raises(ValueError, match="expected the sizes of classification, found others"):
        open_task(tmp_path / "task")
