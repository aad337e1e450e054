"""Whether every byte of a folder is what was written: prepared text, a task, runs and conversions, an export."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polysketch.data import load_tokenizer
from polysketch.data.description import DESCRIPTION_FILE
from polysketch.data.prepared import description_alone, require_shard
from polysketch.data.tokenization import described_tokenizer
from polysketch.progress import Progress
from polysketch.storage.outside import LARGEST, read_object
from polysketch.storage.sealed import unsealed
from polysketch.storage.sums import SUMS, read_sums, require_sum
from polysketch.tasks.description import TASK_FILE, read_task_description
from polysketch.tasks.folder import open_task, require_rows_file
from polysketch.training.checkpoint import list_checkpoints, load_state, require_bound
from polysketch.training.manifest import listed, read_verified
from polysketch.training.requirements import require_folder
from polysketch.training.run_folder import LoopFolder, RunFolder, require_own_tokenizer

Check = Callable[[], object]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Verified:
    """What was found in a folder.

    Attributes:
        kind: what it is, for people.
        parts: what was looked at, each once: files, and what they say of one another.
        problems: one line for each part that is not as it was written.
    """

    kind: str
    parts: int
    problems: tuple[str, ...]


def verify(folder: str | Path, *, progress: bool = False) -> Verified:
    """Compare all that is in a folder with the sums that were written beside it.

    It finds damage, and files that were exchanged for others. It is no signature: whoever writes the files can write
    the sums. Nothing is changed, nor run. A run's plot and TensorBoard's files carry no sum, nor do metrics of earlier
    versions.

    Args:
        folder: what `polysketch prepare`, `task`, `train`, `convert` or `export` made.
        progress: show progress on stderr.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a folder of another kind, or of an earlier version that wrote no sums.

    Cost: every file is read once, about a second for 500 MB; of a checkpoint the largest file is held in memory.
    """
    folder = Path(folder)
    require_folder(folder)
    if _is_foreign_model(folder):
        raise ValueError(f"{folder}: expected sums to compare with, found a model of transformers without {SUMS}")
    for is_one, kind, checks in _KINDS:
        if is_one(folder):
            found = list(_found(list(checks(folder)), progress))
            return Verified(kind, len(found), tuple(problem for problem in found if problem))
    raise ValueError(
        f"{folder}: expected prepared text, a task, a training run, a conversion or an exported model, found none of "
        f"{', '.join(_FILES)}"
    )


def _found(checks: Sequence[Check], shown: bool) -> Iterator[str | None]:
    """What each check complains of."""
    with Progress("verifying", len(checks), "parts", enabled=shown) as progress:
        for check in checks:
            yield _problem(check)
            progress.advance(1)


def _problem(check: Check) -> str | None:
    """What a check complains of; nothing where it passes."""
    try:
        check()
    except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _of_export(folder: Path) -> Iterator[Check]:
    yield partial(read_sums, folder)
    for name, expected in (_readable(partial(read_sums, folder)) or {}).items():
        yield partial(require_sum, folder, name, expected)


def _of_task(folder: Path) -> Iterator[Check]:
    """The task, and then each file of rows; of one that does not open, files may be terabytes of a hole."""
    yield partial(open_task, folder)
    described = _readable(partial(read_task_description, folder)) or {"splits": {}}
    opens = _readable(partial(open_task, folder)) is not None
    sums = [named for files in described["splits"].values() for named in files.items()]
    yield from (partial(require_rows_file, folder, *named) for named in sums if opens or _is_small(folder / named[0]))


def _is_small(path: Path) -> bool:
    return not path.is_file() or path.stat().st_size <= LARGEST


def _of_text(folder: Path) -> Iterator[Check]:
    """The description, and then each file that it names, whatever the others are."""
    yield partial(description_alone, folder)
    description = _readable(partial(description_alone, folder))
    if description is None:
        return
    yield partial(described_tokenizer, folder, description.tokenizer)
    for split in description.splits.values():
        yield from (partial(require_shard, folder, shard, description.dtype) for shard in split.shards)


def _of_run(folder: Path) -> Iterator[Check]:
    run = RunFolder(folder)
    yield run.read_config
    if run.tokenizer.is_dir():
        yield partial(load_tokenizer, run.tokenizer)
        yield partial(require_own_tokenizer, run)
    yield from _of_loop(run)


def _of_conversion(folder: Path) -> Iterator[Check]:
    run = LoopFolder(folder)
    yield partial(_config_of, folder)
    yield from _of_loop(run)
    if (folder / "report.json").is_file():
        yield partial(_require_seal, folder / "report.json")
    if (folder / "model" / SUMS).is_file():
        yield from _of_export(folder / "model")


def _of_loop(run: LoopFolder) -> Iterator[Check]:
    """Metrics and checkpoints."""
    if run.metrics.is_file():
        yield partial(_require_lines, run)
    for checkpoint in list_checkpoints(run.checkpoints):
        checks: list[Check] = [partial(_require_own, run, checkpoint), partial(listed, checkpoint)]
        checks += [partial(read_verified, checkpoint, name) for name in _readable(partial(listed, checkpoint)) or ()]
        yield from (partial(_unless_gone, checkpoint, check) for check in checks)


def _unless_gone(checkpoint: Path, check: Check) -> None:
    """A run that goes on deletes its older checkpoints, each at once: what is gone is not damaged."""
    try:
        check()
    except (OSError, ValueError):
        if checkpoint.is_dir():
            raise


def _require_own(run: LoopFolder, checkpoint: Path) -> None:
    require_bound(checkpoint, load_state(checkpoint), run.identity())


def _require_lines(run: LoopFolder) -> None:
    """Every line of metrics is as it was written, and of this run."""
    damaged = run.open_metrics().damaged()
    if damaged:
        raise ValueError(
            f"{run.metrics}, line {damaged[0]}: expected a line of this run's metrics as it was written, found "
            "one that is damaged, or of another run"
        )


def _readable(read: Callable[[], Found]) -> Found | None:
    """What is read; nothing where it cannot be, which another check tells."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _config_of(folder: Path) -> dict[str, Any]:
    path = LoopFolder(folder).config
    return unsealed(read_object(path), str(path))


def _require_seal(path: Path) -> None:
    unsealed(read_object(path), str(path))


def _is_conversion(folder: Path) -> bool:
    return "conversion" in (_readable(partial(_config_of, folder)) or {})


def _is_foreign_model(folder: Path) -> bool:
    """Whether it is what transformers wrote, and nothing of ours."""
    if any((folder / file).is_file() for file in _FILES[:-1]):
        return False
    config = _readable(partial(read_object, folder / "config.json")) or {}
    return "model_type" in config and "training" not in config


def _has(file: str) -> Callable[[Path], bool]:
    return lambda folder: (folder / file).is_file()


_FILES = (SUMS, TASK_FILE, DESCRIPTION_FILE, "config.json")
_KINDS: tuple[tuple[Callable[[Path], bool], str, Callable[[Path], Iterator[Check]]], ...] = (
    (_has(SUMS), "an exported model", _of_export),
    (_has(TASK_FILE), "a task", _of_task),
    (_has(DESCRIPTION_FILE), "prepared text", _of_text),
    (_is_conversion, "a conversion", _of_conversion),
    (_has("config.json"), "a training run", _of_run),
)
"""How a kind of folder is known, what it is called, and what is looked at; the first that fits."""
