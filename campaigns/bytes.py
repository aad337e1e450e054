"""One byte changed anywhere in what the library wrote: found by the command that reads it, or without effect.

    python -m campaigns.bytes --count 2000 --seed 0
    python -m campaigns.bytes --count 1000000 --only prepared run export

`--count` is for each part: prepared text, a run with its checkpoints and metrics, its export, a conversion, the files
of a state and of a conversation, all of them small, and a larger run. A count that is not below the bytes of a part
takes each of its bytes once; a smaller one draws a file, and a byte of it. One bit is changed, which is drawn, and the
folder is read as commands do. What is a fault: anything read that differs from what was written, or an error that
would be a traceback. Not attacked: the lock, pictures and TensorBoard's files.
"""

import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from campaigns import readers, whole
from campaigns.harness import REFUSALS, Found, main, prepare_text, run_of, write_text
from polysketch.progress import Progress

Byte = tuple[Path, int]
_NOT_READ = ("lock", "tensorboard")
_WIDTH = 8
"""Entries of a hidden vector of the small run: about 15,000 numbers in its checkpoints."""


def _prepared(folder: Path) -> Path:
    made = folder / "prepared"
    return made if made.exists() else prepare_text(write_text(folder / "text"), made)


def _small_run(folder: Path) -> Path:
    """Of the mechanism with the fewest tensors, for all its bytes are attacked."""
    data = _prepared(folder)
    with whole.tiny_means(_WIDTH):
        return run_of(data, folder / "small", steps=2, eval_every=0, attention="linear", attention_options={})


def _exported(folder: Path) -> Path:
    with whole.tiny_means(_WIDTH):
        return readers.make_sources(folder / "sources") / "exported"


def _converted(folder: Path) -> Path:
    """A Llama, by a step of each stage."""
    name = "a Llama, converted"
    _exported(folder)  # whose tokenizer the Llama gets
    given = readers.make(folder, name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        readers.READERS[name].read(given)
    return Path(f"{given}-new")


def _large_run(folder: Path) -> Path:
    return run_of(_prepared(folder), folder / "large", steps=2, eval_every=0)


def _written(write: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / write.__name__)
        return folder / write.__name__

    return make


PARTS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "prepared": (_prepared, whole.read_prepared),
    "run": (_small_run, whole.read_run),
    "export": (_exported, whole.read_exported),
    "conversion": (_converted, whole.read_verified),
    "state": (_written(whole.write_state), whole.read_state),
    "talk": (_written(whole.write_talk), whole.read_talk),
    "large run": (_large_run, whole.read_run),
}
"""What is attacked: what writes it, given a folder for all, and what reads it."""


def campaign(count: int, seed: int, folder: Path, parts: Sequence[str] = tuple(PARTS)) -> Found:
    """So many changed bytes of each part, or all."""
    found = Found()
    for part in parts:
        make, read = PARTS[part]
        place = make(folder)
        wanted, attacked = read(place), chosen(_files(place), count, random.Random(f"{part} {seed}"))
        draw = random.Random(f"bits {part} {seed}")
        with Progress(part, len(attacked), "changes") as progress:
            for path, byte in attacked:
                _attack(path, byte, draw.randrange(8), lambda: read(place) == wanted, found)  # noqa: B023
                progress.advance(1)
        found.figures[part] = {"bytes": sum(path.stat().st_size for path in _files(place)), "attacked": len(attacked)}
        if read(place) != wanted:  # what is whole must not be refused
            found.add(part, "differs though it is whole", is_fault=True)
    return found


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return [path for path in files if not {*_NOT_READ} & {*path.parts} and path.suffix != ".png"]


def chosen(files: Sequence[Path], count: int, draw: random.Random) -> list[Byte]:
    """Every byte, if there are no more than `count`; else drawn, small files as often as large ones."""
    if sum(path.stat().st_size for path in files) <= count:
        return [(path, byte) for path in files for byte in range(path.stat().st_size)]
    drawn = (draw.choice(files) for _ in range(count))
    return [(path, draw.randrange(path.stat().st_size)) for path in drawn]


def _attack(path: Path, byte: int, bit: int, is_same: Callable[[], bool], found: Found) -> None:
    """Change one bit, read, and change it back."""
    name = f"{path.parent.name}/{path.name} byte {byte} bit {bit}"
    with _changed(path, byte, bit):
        try:
            same = is_same()
            found.add(name, "without effect" if same else "used silently", is_fault=not same)
        except REFUSALS:
            found.add(name, "refused")
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            found.add(name, f"traceback of {type(error).__name__}", is_fault=True)


@contextlib.contextmanager
def _changed(path: Path, byte: int, bit: int) -> Iterator[None]:
    content = path.read_bytes()
    path.write_bytes(content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :])
    try:
        yield
    finally:
        path.write_bytes(content)


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 2000, argv, parts=tuple(PARTS))


if __name__ == "__main__":
    sys.exit(run())
