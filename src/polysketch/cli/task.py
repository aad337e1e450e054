"""`polysketch task NAME`: a task as a folder, to train and to measure models on."""

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

__all__ = ["TaskFlags", "run"]


@dataclass(frozen=True)
class TaskFlags:
    """Make a folder of a task, for `polysketch train --data FOLDER` and `polysketch evaluate`.

    A task is made from a seed, in sizes that --set changes: selective-copying, induction, recall, reversal, listops,
    in-context-recall, memorization, compression; without --out its sizes are listed. Or it is read from local files:
    `texts` with a class each (JSON Lines; tables of two columns; a folder with a folder of text files for each class);
    `pairs` of texts with a class each (tables of five columns, as Long Range Arena has them); `words` with a label each
    (JSON Lines of lists; CoNLL's columns); `sequences` to read and to write (JSON Lines of two texts; tables of two
    columns, source and target); `images` with a class each (an IDX file of images and one of labels, as MNIST has them;
    CIFAR-10's binary files); and `pathfinder`, a folder of images and one of metadata, as Long Range Arena has them.
    `digits` are the 1,797 images that scikit-learn ships.

    Examples:
      polysketch task reversal --set length=50 --out data/reversal
      polysketch task selective-copying --set length=1024 --out data/copying
      polysketch task digits --patch 2 --out data/digits
      polysketch task texts --train train.jsonl --max-tokens 1000 --out data/reviews
      polysketch task words --train train.conll --test test.conll --out data/names
      polysketch task sequences --train train.tsv --out data/dates
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Which task; see above."""

    out: Path | None = None
    """Folder to make. It appears when everything is written."""

    set: tuple[str, ...] = ()
    """Sizes of a task made from a seed, each as SIZE=VALUE. examples=64000 trains on so many rows again and again."""

    train: tuple[Path, ...] = ()
    """Files or folders to train on."""

    validation: tuple[Path, ...] = ()
    """Files or folders to validate on. Default: a twentieth of those to train on; of pathfinder a tenth."""

    test: tuple[Path, ...] = ()
    """Files or folders to test on. Default: none; of pathfinder a tenth of those to train on."""

    tokenizer: str = "bytes"
    """How texts become tokens: bytes; symbols, which stand apart by spaces; or the path of a tokenizer, as for
    `polysketch prepare`."""

    max_tokens: int | None = None
    """Cut longer texts. Of `words` and `sequences`, whose answers would be cut too: refuse them."""

    text_field: str | None = None
    """Field of JSON Lines with the text, of `words` with the list of words. Default: text; of `words` tokens."""

    class_field: str | None = None
    """Field of JSON Lines with the class, a text or a whole number, of `words` with the list of labels. Default: label;
    of `words` labels."""

    source_field: str = "source"
    """Field of JSON Lines with the text to read, of `sequences`."""

    target_field: str = "target"
    """Field of JSON Lines with the text to write, of `sequences`."""

    class_names: tuple[str, ...] | None = None
    """Names of the classes of images, in order. Default: their numbers."""

    grey: bool = False
    """Make images grey: one number a pixel, as Long Range Arena has CIFAR-10."""

    patch: int | None = None
    """Pixels of a side of a patch of images: each patch is then a token. Default: each pixel is one."""

    seed: int = 0
    """Of the rows that are kept for validation. Of a task made from a seed, give --set seed=N."""


def run(flags: TaskFlags) -> int:
    """Make the folder and say what is in it; without --out, list the sizes of a task.

    Args:
        flags: the command line.

    Returns:
        Exit status 0.

    Raises:
        ValueError, OSError: no such task or size, sizes that cannot be, files of another layout, a folder in use.
    """
    from polysketch.tasks.registry import TASKS
    from polysketch.tasks.requirements import check_requirements

    check_requirements(flags.name, flags.out)
    _check_flags(flags)
    if flags.out is None:
        return _list_sizes(flags.name)
    from polysketch.tasks import write_task

    tokenizer = _tokenizer(flags) if flags.name in _OF_TEXT else None
    task = _generated(flags) if flags.name in TASKS else _from_files(flags, tokenizer)
    write_task(task, flags.out, tokenizer=tokenizer)
    rows = {split: task.num_rows(split) for split in ("train", "validation", "test")}
    listed = ", ".join(
        f"{'endless' if count is None else f'{count:,}'} {name}" for name, count in rows.items() if count != 0
    )
    print(f"{flags.out}: {listed} rows of up to {task.longest:,} tokens, {task.vocab_size:,} ids; asks: {_asks(task)}")
    return 0


_READ = ("train", "validation", "test", "seed")
_OF_TEXT = ("texts", "pairs", "words", "sequences")
_NAMES_LISTED = 6
_TAKEN: dict[str, tuple[str, ...]] = {
    "texts": (*_READ, "tokenizer", "max_tokens", "text_field", "class_field"),
    "pairs": (*_READ, "tokenizer", "max_tokens"),
    "words": (*_READ, "tokenizer", "max_tokens", "text_field", "class_field"),
    "sequences": (*_READ, "tokenizer", "max_tokens", "source_field", "target_field"),
    "images": (*_READ, "class_names", "grey", "patch"),
    "pathfinder": _READ,
    "digits": ("seed", "patch"),
}
"""The flags that say something about each task out of files; about others --set does."""


def _check_flags(flags: TaskFlags) -> None:
    """Refuse flags that would do nothing."""
    taken = ("name", "out", *_TAKEN.get(flags.name, ("set",)))
    for field in dataclasses.fields(flags):
        if field.name not in taken and getattr(flags, field.name) != field.default:
            raise ValueError(f"{flags.name}: expected no --{field.name.replace('_', '-')}, found one: leave it out")


def _asks(task: Any) -> str:
    asked = {
        "next": "the next token, at some places",
        "each": "a token at each place",
        "labels": f"one of {task.num_classes} labels for each word",
        "class": f"one of {task.num_classes} classes{_listed(getattr(task, 'class_names', ()))}",
        "pair": f"one of {task.num_classes} classes for two documents",
        "picture": f"one of {task.num_classes} classes of a picture in patches",
        "written": "a sequence",
        "recovered": "the row, out of one vector",
    }
    return asked[task.asks]


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if 0 < len(names) <= _NAMES_LISTED else ""


def _list_sizes(name: str) -> int:
    from polysketch.tasks import task_class

    kind = task_class(name)
    print(" ".join((kind.__doc__ or "").split("\n\n")[0].split()))
    for each in dataclasses.fields(kind):
        print(f"  --set {each.name}={each.default}")
    return 0


def _generated(flags: TaskFlags) -> Any:
    from polysketch.tasks import task_class

    kind = task_class(flags.name)
    types = typing.get_type_hints(kind)
    known = {each.name: types[each.name] for each in dataclasses.fields(kind)}
    return kind(**dict(_size(text, known) for text in flags.set))


def _size(text: str, known: dict[str, Any]) -> tuple[str, Any]:
    """The name and the value of SIZE=VALUE."""
    name, _, value = text.partition("=")
    if name not in known:
        raise ValueError(f"--set {text}: expected SIZE=VALUE with one of {', '.join(known)}")
    kind = known[name]
    try:
        return name, value if typing.get_origin(kind) is Literal else kind(value)
    except ValueError as error:
        raise ValueError(f"--set {text}: expected a value such as {kind.__name__} has, found {value!r}") from error


def _tokenizer(flags: TaskFlags) -> Any:
    from polysketch.data.tokenization import load_tokenizer

    if flags.tokenizer == "symbols" and flags.name in ("texts", "sequences"):
        return None
    return load_tokenizer(flags.tokenizer)


def _from_files(flags: TaskFlags, tokenizer: Any) -> Any:
    from polysketch.tasks.images import classified_images, pathfinder
    from polysketch.tasks.sources import split_off

    if flags.name == "digits":
        from polysketch.tasks.shipped import digits

        return split_off(digits(flags.patch), 0.05, flags.seed)
    if not flags.train:
        raise ValueError(f"{flags.name}: expected --train, files or folders, found none")
    given = {"train": flags.train, "validation": flags.validation, "test": flags.test}
    sources: dict[str, Sequence[Path]] = {split: paths for split, paths in given.items() if paths}
    if flags.name == "pathfinder":
        task = pathfinder(sources)
        task = task if flags.test else split_off(task, 0.1, flags.seed, "test")
        return task if flags.validation else split_off(task, 0.1 if flags.test else 1 / 9, flags.seed)
    if flags.name == "images":
        task = classified_images(sources, flags.class_names, grey=flags.grey, patch_size=flags.patch)
    else:
        task = _texts(flags, sources, tokenizer)
    return task if flags.validation else split_off(task, 0.05, flags.seed)


def _texts(flags: TaskFlags, sources: dict[str, Sequence[Path]], tokenizer: Any) -> Any:
    from polysketch.tasks.labelled_words import labelled_words
    from polysketch.tasks.source_target import sequences_to_write
    from polysketch.tasks.sources import classified_pairs, classified_texts

    encoding: tuple[Any, ...] = (None,)
    given: dict[str, Any] = {"max_tokens": flags.max_tokens, **_fields(flags)}
    if tokenizer is not None:
        encoding, given["alphabet"] = (tokenizer.encode, tokenizer.vocab_size), tokenizer.sha256
        given |= {"end": tokenizer.end_of_text} if flags.name == "sequences" else {}
    readers: dict[str, Any] = {"pairs": classified_pairs, "words": labelled_words, "sequences": sequences_to_write}
    return readers.get(flags.name, classified_texts)(sources, *encoding, **given)


def _fields(flags: TaskFlags) -> dict[str, Any]:
    """The names of fields of JSON Lines, as the reader takes them."""
    if flags.name == "sequences":
        return {"source_field": flags.source_field, "target_field": flags.target_field}
    text, label = ("words_field", "labels_field") if flags.name == "words" else ("text_field", "class_field")
    given = {text: flags.text_field, label: flags.class_field}
    return {name: value for name, value in given.items() if value is not None}
