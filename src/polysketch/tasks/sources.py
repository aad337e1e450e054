"""Classified rows out of local files: texts, lists of symbols, and images as their pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from polysketch.data.compressed import plain_name, read_bytes
from polysketch.tasks.stored import Classification, ClassifiedRows

Labelled = tuple[str, str, str]
"""A text, the name of its class, and where both stand."""

_IDX_BYTES = 0x08  # the type of an IDX file's numbers
_CIFAR_SHAPE = (32, 32, 3)
_LEFT_OUT = ("(", ")")
# The parentheses around every entry in the files of ListOps say nothing new.


def classified_texts(
    sources: dict[str, Sequence[Path]],
    encode: Callable[[str], Sequence[int]] | None,
    vocab_size: int = 0,
    *,
    max_tokens: int | None = None,
    text_field: str = "text",
    class_field: str = "label",
) -> Classification:
    """Texts with their classes.

    Args:
        sources: by split, "train" at least, files and folders: JSON Lines of objects with the two fields; tables of two
            columns apart by a tab, a class and then a text, or under a line that says "Source" and "Target", as Long
            Range Arena has them; or a folder with a folder of text files for each class, as the Large Movie Review
            Dataset. Each file may be compressed (.gz).
        encode: a tokenizer's. None: texts are symbols apart by spaces, and get ids from 1 on in the order of the
            alphabet; parentheses are left out.
        vocab_size: number of ids of `encode`.
        max_tokens: longer rows are cut.
        text_field, class_field: of JSON Lines.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, an unknown class or symbol in another split, an empty text; the message says where.
    """
    found = {
        split: [row for path in paths for row in _labelled(Path(path), text_field, class_field)]
        for split, paths in sources.items()
    }
    names = sorted({name for _, name, _ in found["train"]})
    if encode is None:
        symbols = sorted({symbol for text, _, _ in found["train"] for symbol in _symbols(text)})
        encode, vocab_size = _encoder(symbols), len(symbols) + 1
    splits = {split: _rows(rows, names, encode, max_tokens) for split, rows in found.items()}
    return Classification(splits, vocab_size, names)


def _rows(
    rows: list[Labelled], names: list[str], encode: Callable[[str], Sequence[int]], most: int | None
) -> ClassifiedRows:
    ids = []
    for text, name, place in rows:
        if name not in names:
            raise ValueError(f"{place}: expected a class of training, {', '.join(names)}, found {name!r}")
        ids.append(np.asarray(encode(text)[:most], dtype=np.int64))
        if not len(ids[-1]):
            raise ValueError(f"{place}: expected a text of at least one token, found {text!r}")
    return ClassifiedRows.of(ids, [names.index(name) for _, name, _ in rows])


def _symbols(text: str) -> list[str]:
    return [symbol for symbol in text.split() if symbol not in _LEFT_OUT]


def _encoder(symbols: list[str]) -> Callable[[str], list[int]]:
    ids = {symbol: number for number, symbol in enumerate(symbols, start=1)}

    def encode(text: str) -> list[int]:
        try:
            return [ids[symbol] for symbol in _symbols(text)]
        except KeyError as error:
            raise ValueError(f"expected symbols that training has, {' '.join(symbols)}, found {error}") from error

    return encode


def _labelled(path: Path, text_field: str, class_field: str) -> Iterator[Labelled]:
    """The texts of a file or a folder, with their classes."""
    if not path.exists():
        raise FileNotFoundError(f"expected a file or a folder, found nothing at {path}")
    if path.is_dir():
        return _of_folder(path)
    suffix = Path(plain_name(path)).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _of_json_lines(path, text_field, class_field)
    if suffix in (".tsv", ".tab"):
        return _of_table(path)
    raise ValueError(f"expected a .jsonl or .tsv file or a folder of classes, found {path}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where a line is, and the line; blank ones are passed over."""
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found something else in {path}: {error}") from error
    return ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _of_json_lines(path: Path, text_field: str, class_field: str) -> Iterator[Labelled]:
    for place, line in _lines(path):
        try:
            row = json.loads(line)
            text, name = row[text_field], row[class_field]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: expected an object with {text_field!r} and {class_field!r}") from error
        if not isinstance(text, str) or not isinstance(name, str | int):
            raise ValueError(f"{place}: expected a text and a class, found {type(text).__name__} and {name!r}")
        yield text, str(name), place


def _of_table(path: Path) -> Iterator[Labelled]:
    text_first = False
    for number, (place, line) in enumerate(_lines(path)):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != 2:
            raise ValueError(f"{place}: expected two columns apart by a tab, found {len(cells)}")
        if number == 0 and cells in (["Source", "Target"], ["Target", "Source"]):
            text_first = cells[0] == "Source"
            continue
        text, name = cells if text_first else reversed(cells)
        yield text, name.strip(), place


def _of_folder(path: Path) -> Iterator[Labelled]:
    classes = sorted(child for child in path.iterdir() if child.is_dir())
    if len(classes) < 2:
        raise ValueError(f"{path}: expected a folder for each of at least two classes, found {len(classes)}")
    for folder in classes:
        for file in sorted(folder.glob("*.txt*")):
            yield read_bytes(file).decode(errors="replace"), folder.name, str(file)


def classified_images(sources: dict[str, Sequence[Path]], class_names: Sequence[str] | None = None) -> Classification:
    """Images with their classes; a row is the pixels of one, line by line, 0 to 255.

    Args:
        sources: by split, "train" at least: an IDX file of images and one of labels, in this order, as MNIST and
            FashionMNIST have them; or CIFAR-10's binary files (data_batch_1.bin and so on; not the pickled ones).
        class_names: of the classes in order; their numbers when None.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, or splits of unlike images.
    """
    found = {split: _images([Path(path) for path in paths]) for split, paths in sources.items()}
    shapes = {images.shape[1:] for images, _ in found.values()}
    if len(shapes) != 1:
        raise ValueError(f"expected images of one size, found {', '.join(map(str, sorted(shapes)))}")
    count = 1 + max(int(labels.max()) for _, labels in found.values())
    names = list(map(str, range(count))) if class_names is None else list(class_names)
    if len(names) < count:
        raise ValueError(f"expected names of {count} classes, found {len(names)}")
    splits = {
        split: ClassifiedRows.of(list(images.reshape(len(images), -1)), labels.tolist())
        for split, (images, labels) in found.items()
    }
    return Classification(splits, 256, names, tuple(shapes.pop()))


def _images(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """(images, height, width, channels) and (images,) labels."""
    contents = [(path, read_bytes(path)) for path in paths]
    if all(plain_name(path).endswith(".bin") for path in paths):
        parts = [_cifar(path, data) for path, data in contents]
        return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
    if len(paths) != 2:
        raise ValueError(f"expected an IDX file of images and one of labels, or .bin files of CIFAR-10, found {paths}")
    images, labels = (_idx(path, data) for path, data in contents)
    if images.ndim not in (3, 4) or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"expected images in {paths[0]} and as many labels in {paths[1]}, found shapes {images.shape} and "
            f"{labels.shape}"
        )
    return images.reshape(*images.shape[:3], -1), labels


def _idx(path: Path, data: bytes) -> np.ndarray:
    """The array of an IDX file of bytes: two zeros, the type, the number of axes, their lengths, the numbers."""
    axes = data[3] if len(data) > 4 and data[:3] == bytes([0, 0, _IDX_BYTES]) else 0
    shape = np.frombuffer(data, ">u4", axes, 4).astype(int) if len(data) >= 4 + 4 * axes else np.empty(0, int)
    if not axes or len(data) != 4 + 4 * axes + int(shape.prod()):
        raise ValueError(f"expected a whole IDX file of bytes, found something else: {path}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _cifar(path: Path, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """A label and then red, green and blue of 32 x 32 pixels, again and again."""
    height, width, channels = _CIFAR_SHAPE
    size = 1 + height * width * channels
    if not data or len(data) % size:
        raise ValueError(f"expected CIFAR-10's binary layout, rows of {size} bytes, found {len(data)} bytes: {path}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return rows[:, 1:].reshape(-1, channels, height, width).transpose(0, 2, 3, 1), rows[:, 0]


def split_off(task: Classification, share: float, seed: int = 0) -> Classification:
    """The same rows, a share of those of training moved to "validation".

    Raises:
        ValueError: there is a validation split, or nothing would remain.
    """
    rows = task.splits["train"]
    count = round(share * len(rows))
    if "validation" in task.splits or not 0 < count < len(rows):
        raise ValueError(f"expected no validation rows yet and a share that leaves some to train on, found {share}")
    order = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    splits = {**task.splits, "train": _chosen(rows, kept), "validation": _chosen(rows, held)}
    return Classification(splits, task.vocab_size, task.class_names, task.shape)


def _chosen(rows: ClassifiedRows, indices: Iterable[int]) -> ClassifiedRows:
    starts = np.concatenate([[0], rows.ends[:-1]])
    chosen = [int(index) for index in indices]
    return ClassifiedRows.of(
        [rows.ids[starts[i] : rows.ends[i]] for i in chosen], [int(rows.classes[i]) for i in chosen]
    )
