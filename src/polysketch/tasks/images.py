"""Classified rows out of local files of images, as their pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from polysketch.data.compressed import plain_name, read_bytes
from polysketch.extras import require
from polysketch.tasks.stored import Classification, ClassifiedRows

_IDX_BYTES = 0x08  # the type of an IDX file's numbers
_CIFAR_SHAPE = (32, 32, 3)
_GREY = np.array([0.2989, 0.587, 0.114], np.float32)  # of red, green and blue

PIXELS = "pixels"
"""The alphabet of brightness."""


def classified_images(
    sources: dict[str, Sequence[Path]],
    class_names: Sequence[str] | None = None,
    *,
    grey: bool = False,
    patch_size: int | None = None,
) -> Classification:
    """Images with their classes; a row is the pixels of one, line by line, 0 to 255.

    Args:
        sources: by split, "train" at least: an IDX file of images and one of labels, in this order, as MNIST and
            FashionMNIST have them; or CIFAR-10's binary files (data_batch_1.bin and so on; not the pickled ones).
        class_names: of the classes in order; their numbers when None.
        grey: make of red, green and blue one number a pixel, 0.2989, 0.587 and 0.114 of them: so Long Range Arena reads
            CIFAR-10.
        patch_size: pixels of a side of a patch, for models that take a patch for a token.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, splits of unlike images, images without colours that are to become grey, or patches
            that do not divide them.
    """
    found = {split: _images([Path(path) for path in paths]) for split, paths in sources.items()}
    if grey:
        found = {split: (_without_colours(images), labels) for split, (images, labels) in found.items()}
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
    return Classification(splits, 256, names, tuple(shapes.pop()), PIXELS, patch_size=patch_size)


def _without_colours(images: np.ndarray) -> np.ndarray:
    """(images, height, width, 3) of bytes -> (images, height, width, 1)."""
    if images.shape[-1] != len(_GREY):
        raise ValueError(f"expected images of red, green and blue to make them grey, found {images.shape[-1]} channel")
    return (images @ _GREY).round().astype(np.uint8)[..., None]


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
    if not images.size:
        raise ValueError(f"expected images, found none: {paths[0]}")
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


def pathfinder(sources: dict[str, Sequence[Path]]) -> Classification:
    """Images of Long Range Arena's Pathfinder: class 1 where a path joins the two circles, else 0.

    Args:
        sources: by split, "train" at least, folders as they are published, for instance pathfinder32 and in it
            curv_contour_length_14: `metadata/*.npy`, which are texts, have a line for each image, with its folder, its
            file and its class as first, second and fourth word; the images are PNG files in `imgs`. Colours become
            grey. Files without a byte are left out, as there: the published set has some.

    Raises:
        FileNotFoundError: no metadata, or an image is missing.
        ImportError: the extra `images` is missing.
        ValueError: another layout, or images of several sizes.
    """
    splits, shapes = {}, set()
    for split, folders in sources.items():
        rows = [row for folder in folders for row in _of_metadata(Path(folder))]
        shapes |= {image.shape for image, _ in rows}
        splits[split] = ClassifiedRows.of([image.reshape(-1) for image, _ in rows], [label for _, label in rows])
    if len(shapes) != 1:
        raise ValueError(f"expected images of one size, found {', '.join(map(str, sorted(shapes))) or 'no image'}")
    height, width = shapes.pop()
    return Classification(splits, 256, ["apart", "joined"], (height, width, 1), PIXELS)


def _of_metadata(folder: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Each image, (height, width) of bytes, and its class."""
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise FileNotFoundError(f"expected Pathfinder's metadata/*.npy and imgs in {folder}, found none")
    for file in files:
        for number, line in enumerate(read_bytes(file).decode(errors="replace").splitlines(), start=1):
            words = line.split()
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise ValueError(
                    f"{file}:{number}: expected a folder, a file, a number and a class of 0 or 1, found {line[:60]!r}"
                )
            image = folder / words[0] / words[1]
            if not image.is_file():
                raise FileNotFoundError(f"{file}:{number}: expected the image {image}, found none")
            if image.stat().st_size:
                yield _grey(image), int(words[3])


def _grey(path: Path) -> np.ndarray:
    """(height, width) of bytes."""
    pillow = require("PIL.Image")
    try:
        with pillow.open(io.BytesIO(path.read_bytes()), formats=["PNG"]) as image:
            return np.asarray(image.convert("L"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"expected a PNG image, found something else: {path}: {error}") from error
