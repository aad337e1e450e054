"""Preparing with several workers, or again after a kill, gives the bytes of one worker that was left alone."""

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from attention.covering import first_always
from polysketch.data import encoding, prepare, unfinished, workers
from polysketch.data.corpus import Corpus, Document, Place, ReadOptions, Selection
from polysketch.data.splits import SplitRule
from polysketch.data.writer import SplitWriter
from polysketch.progress import Progress
from polysketch.storage import FolderLock, disk

SHARES = {"validation_share": 0.2, "test_share": 0.2, "progress": False}
SETTINGS = {"tokenizer": "bpe:400", "shard_tokens": 700, **SHARES}


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_batches(monkeypatch):
    """A few documents in each batch, of lengths that differ."""
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1500)


@pytest.fixture
def alone(corpus_folder, tmp_path) -> dict[str, bytes]:
    """What one worker makes that nobody disturbs."""
    return contents_of(prepare(corpus_folder, out=tmp_path / "alone", **SETTINGS).folder)


# Several workers


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "tokenizer",
    ["bpe:400", *(pytest.param(name, marks=pytest.mark.full) for name in ("bytes", "sentencepiece:330"))],
)
def test_any_number_of_workers_gives_the_same_bytes(corpus_folder, tmp_path, tokenizer):
    settings = SETTINGS | {"tokenizer": tokenizer}
    made = [
        contents_of(prepare(corpus_folder, out=tmp_path / f"{number}", workers=number, **settings).folder)
        for number in (1, 3)
    ]
    assert made[0] == made[1]


def slow_at_first(documents: list[Document]) -> encoding.Encoded:
    """Encodes earlier batches later than those after them."""
    time.sleep(0.3 * (documents[0].origin.endswith("000.txt") or documents[0].origin.endswith("010.txt")))
    return workers._encoders[""](documents)


@pytest.mark.usefixtures("small_batches")
def test_documents_keep_their_order_whichever_worker_is_first(corpus_folder, tmp_path, alone, monkeypatch):
    monkeypatch.setattr(workers, "_encode", slow_at_first)
    assert contents_of(prepare(corpus_folder, out=tmp_path / "out", workers=3, **SETTINGS).folder) == alone


def killed_once(documents: list[Document]) -> encoding.Encoded:
    """Kills its own process in the middle of the text, the first time."""
    mark = Path(documents[0].origin).parent.parent / "killed"
    if any(document.origin.endswith("030.txt") for document in documents) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return workers._encoders[""](documents)


@pytest.mark.usefixtures("small_batches")
def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(corpus_folder, tmp_path, alone, monkeypatch):
    monkeypatch.setattr(workers, "_encode", killed_once)
    made = contents_of(prepare(corpus_folder, out=tmp_path / "out", workers=2, **SETTINGS).folder)
    assert (tmp_path / "killed").exists()
    assert made == alone


def always_killed(documents: list[Document]) -> encoding.Encoded:
    """Kills its own process at one document."""
    if any(document.origin.endswith("030.txt") for document in documents):
        os.kill(os.getpid(), signal.SIGKILL)
    return workers._encoders[""](documents)


@pytest.mark.full
@pytest.mark.usefixtures("small_batches")
def test_workers_that_end_at_every_attempt_are_an_error_that_says_where(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_encode", always_killed)
    with pytest.raises(RuntimeError, match=r"ended 3 times at the text from .*\.txt on.*fewer --workers"):
        prepare(corpus_folder, out=tmp_path / "out", workers=2, **SETTINGS)
    assert not (tmp_path / "out").exists()


def losing(documents: list[Document]) -> encoding.Encoded:
    raise ValueError(f"found in a worker: {documents[0].origin}")


def test_an_error_in_a_worker_is_that_of_one_worker(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_encode", losing)
    with pytest.raises(ValueError, match=r"^found in a worker: .*000\.txt$"):
        prepare(corpus_folder, out=tmp_path / "out", workers=2, **SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_a_tokenizer_that_other_processes_do_not_know_is_refused(corpus_folder, tmp_path, tokenizers):
    class Own(type(tokenizers["bytes"])):
        """A class of the caller's."""

    with pytest.raises(ValueError, match="found one of Own: prepare with one worker"):
        prepare(corpus_folder, Own(), tmp_path / "out", workers=2, **SHARES)


def test_no_worker_is_refused(corpus_folder, tmp_path):
    with pytest.raises(ValueError, match="workers of at least 1, found 0"):
        prepare(corpus_folder, "bytes", tmp_path / "out", workers=0, **SHARES)


@pytest.mark.usefixtures("small_batches")
def test_text_is_read_no_further_than_the_workers_need(corpus_folder, tokenizers):
    corpus = Corpus([str(corpus_folder)], ReadOptions(), SplitRule())
    read, most = 0, 0

    def counted():
        nonlocal read
        for batch in encoding.batches(corpus, Place()):
            read += 1
            yield batch

    with workers.encoding_workers(tokenizers["bytes"], 2) as encode:
        for given, _ in enumerate(encode(counted())):
            most = max(most, read - given)
    assert read > 15
    assert most == 2 * workers.BATCHES_AHEAD


# Going on


def kill_at(folder: Path, out: Path, call: int, *, every: float = 0.0, workers: int = 1) -> int:
    """Kill a preparation after a number of writes; the exit status. It is a fork, which need not import anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which these tests have none of
        child = os.fork()
    if not child:
        try:
            prepare_until(folder, out, call, every, workers)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare_until(folder: Path, out: Path, call: int, every: float, workers: int) -> None:
    """Prepare, and kill this very process after a number of writes."""
    encoding.BATCH_BYTES, unfinished.SECONDS_BETWEEN = 1500, every
    write, calls = SplitWriter.write, iter(range(10**9))

    def killing(self: SplitWriter, *arguments: Any) -> None:
        write(self, *arguments)
        self._file.flush()
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    SplitWriter.write = killing
    prepare(folder, out=out, workers=workers, **SETTINGS)


@pytest.mark.parametrize(("call", "number"), first_always([(10, 2), (10, 1), (2, 1), (25, 1)], several=True))
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(corpus_folder, tmp_path, alone, call, number):
    out = tmp_path / "out"
    assert kill_at(corpus_folder, out, call, workers=number) == -signal.SIGKILL
    assert not out.exists()
    record = json.loads((tmp_path / "out.partial" / unfinished.RECORD_FILE).read_text())
    assert 0 <= record["place"]["part"] < 59
    (corpus_folder / "000.txt").chmod(0o000)  # what was read is not read again
    assert os.getuid() == 0 or not os.access(corpus_folder / "000.txt", os.R_OK)
    assert contents_of(prepare(corpus_folder, out=out, workers=number, **SETTINGS).folder) == alone
    assert not (tmp_path / "out.partial").exists()


def test_it_may_be_killed_again_and_again(corpus_folder, tmp_path, alone):
    out = tmp_path / "out"
    places = []
    for _ in range(2):
        assert kill_at(corpus_folder, out, 8) == -signal.SIGKILL
        places.append(json.loads((tmp_path / "out.partial" / unfinished.RECORD_FILE).read_text())["place"]["part"])
    assert places[0] < places[1]
    assert contents_of(prepare(corpus_folder, out=out, **SETTINGS).folder) == alone


def test_what_was_read_is_not_opened_again(corpus_folder, tmp_path, alone, monkeypatch):
    out = tmp_path / "out"
    kill_at(corpus_folder, out, 25)
    done = json.loads((tmp_path / "out.partial" / unfinished.RECORD_FILE).read_text())["place"]["part"]
    assert done > 20
    opened = []
    original = Corpus._read
    monkeypatch.setattr(Corpus, "_read", lambda self, part: opened.append(part.path.name) or original(self, part))
    prepare(corpus_folder, out=out, **SETTINGS)
    assert opened == [f"{number:03}.txt" for number in range(done, 60)]


def test_without_a_record_it_begins_anew(corpus_folder, tmp_path, alone):
    out = tmp_path / "out"
    assert kill_at(corpus_folder, out, 20, every=1000.0) == -signal.SIGKILL
    assert not (tmp_path / "out.partial" / unfinished.RECORD_FILE).exists()
    assert contents_of(prepare(corpus_folder, out=out, **SETTINGS).folder) == alone


class Fault(BaseException):
    """Stands for a signal at an awkward moment."""


def fail_at(monkeypatch, owner, name: str, call: int, error: BaseException) -> None:
    """Make the `call`-th call of a function raise."""
    original = getattr(owner, name)
    calls = iter(range(10**9))

    def failing(*arguments, **keywords):
        if next(calls) == call:
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        *(pytest.param(error, marks=pytest.mark.full) for error in (Fault(), OSError(28, "No space left on device"))),
    ],
)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("sync", 30), ("rename", 5), ("replace_file", 9)),
        pytest.param("write", 2, marks=pytest.mark.full),
        *(pytest.param("sync", call, marks=pytest.mark.full) for call in (6, 90)),
        *(pytest.param("rename", call, marks=pytest.mark.full) for call in (1, 12)),
        pytest.param("replace_file", 1, marks=pytest.mark.full),
        pytest.param("write", 9, marks=pytest.mark.full),
    ],
)
def test_after_any_failed_operation_it_goes_on(corpus_folder, tmp_path, alone, monkeypatch, name, call, error):
    monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_at(patched, disk, name, call, error)
        with pytest.raises(type(error)):
            prepare(corpus_folder, out=out, **SETTINGS)
    assert not out.exists()
    assert (tmp_path / "out.partial" / unfinished.RECORD_FILE).exists()
    assert contents_of(prepare(corpus_folder, out=out, **SETTINGS).folder) == alone


def operations(monkeypatch, action) -> int:
    """How many renames an action makes."""
    count = 0
    original = disk.rename

    def counted(*arguments):
        nonlocal count
        count += 1
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "rename", counted)
        action()
    return count


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "before_the_last", [0, 2, *(pytest.param(number, marks=pytest.mark.full) for number in (1, 3))]
)
def test_interrupted_while_files_get_their_last_names_it_goes_on(corpus_folder, tmp_path, monkeypatch, before_the_last):
    settings = SETTINGS | {"shard_tokens": 10**6}  # one file for each split, with a plain name
    monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
    renames = operations(monkeypatch, lambda: prepare(corpus_folder, out=tmp_path / "alone", **settings))
    with monkeypatch.context() as patched:
        fail_at(patched, disk, "rename", renames - 1 - before_the_last, Fault())
        with pytest.raises(Fault):
            prepare(corpus_folder, out=tmp_path / "out", **settings)
    prepare(corpus_folder, out=tmp_path / "out", **settings)
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "alone")


@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_says_what_is_kept(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
    fail_at(monkeypatch, disk, "write", 5, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=r"the same command goes on with what is kept in .*out\.partial"):
        prepare(corpus_folder, out=tmp_path / "out", **SETTINGS)


OTHER_COMMANDS = [
    ({"shard_tokens": 701}, "shard_tokens"),
    ({"tokenizer": "bpe:401"}, "tokenizer"),
    ({"seed": 1}, "shares"),
    ({"max_documents": 50}, "selection, cut_text"),
    ({"options": ReadOptions(text_field="body")}, "options"),
    ({"options": ReadOptions(cut_text=100)}, "cut_text"),
]


def test_another_command_does_not_take_unfinished_work_for_its_own(corpus_folder, tmp_path, alone):
    out = tmp_path / "out"
    kill_at(corpus_folder, out, 10)
    before = contents_of(tmp_path / "out.partial")
    for change, named in OTHER_COMMANDS:
        said = rf"of the same command and files, found another {named}: .*or delete"
        with pytest.raises(FileExistsError, match=said):
            prepare(corpus_folder, out=out, **(SETTINGS | change))
    after = contents_of(tmp_path / "out.partial")
    assert {name for name in before if before[name] != after[name]} <= {".polysketch-lock"}
    assert contents_of(prepare(corpus_folder, out=out, **SETTINGS).folder) == alone


def test_a_file_that_changed_after_it_was_read_is_noticed(corpus_folder, tmp_path):
    kill_at(corpus_folder, tmp_path / "out", 10)
    (corpus_folder / "001.txt").write_text("other text")
    with pytest.raises(FileExistsError, match="found another a file that was read"):
        prepare(corpus_folder, out=tmp_path / "out", **SETTINGS)


def test_a_file_that_was_not_read_yet_may_be_repaired(corpus_folder, tmp_path):
    kill_at(corpus_folder, tmp_path / "out", 10)
    (corpus_folder / "059.txt").write_text("other text " * 50)
    made = contents_of(prepare(corpus_folder, out=tmp_path / "out", **SETTINGS).folder)
    tokenizer = tmp_path / "out" / "tokenizer.json"
    again = prepare(corpus_folder, out=tmp_path / "again", **(SETTINGS | {"tokenizer": str(tokenizer)}))
    assert made == contents_of(again.folder)


@pytest.mark.usefixtures("small_batches")
def test_pieces_of_another_length_do_not_go_on_in_the_middle_of_a_file(tmp_path, monkeypatch):
    """How long pieces are follows from the sizes of all files, of which one may change before it is read."""
    monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
    folder, out = tmp_path / "books", tmp_path / "out"
    folder.mkdir()
    for name, lines in (("a", 600), ("b", 600)):
        (folder / f"{name}.txt").write_text("".join(f"{name} line {number} of it\n" for number in range(lines)))
    with monkeypatch.context() as patched:
        fail_at(patched, disk, "sync", 30, Fault())
        with pytest.raises(Fault):
            prepare(folder, out=out, **SETTINGS)
    record = json.loads((tmp_path / "out.partial" / unfinished.RECORD_FILE).read_text())
    assert record["place"]["part"] == 0  # in the middle of the first file
    (folder / "b.txt").write_text("another line of it\n" * 4000)
    with pytest.raises(FileExistsError, match="found another cut_text: "):
        prepare(folder, out=out, **SETTINGS)
    given = ReadOptions(cut_text=record["job"]["cut_text"])
    with pytest.raises(FileExistsError, match="found another cut_text: "):
        prepare(folder, out=out, **SETTINGS, options=ReadOptions(cut_text=given.cut_text + 1))
    path = tmp_path / "out.partial" / unfinished.RECORD_FILE
    kept = path.read_bytes()
    del record["cutting"]  # as recorded when files were cut at other places
    path.write_text(json.dumps(record))
    with pytest.raises(FileExistsError, match="found another cutting: "):
        prepare(folder, out=out, **SETTINGS, options=given)
    path.write_bytes(kept)
    made = contents_of(prepare(folder, out=out, **SETTINGS, options=given).folder)
    tokenizer = str(out / "tokenizer.json")
    again = prepare(folder, out=tmp_path / "again", **(SETTINGS | {"tokenizer": tokenizer}), options=given)
    assert made == contents_of(again.folder)


@pytest.mark.parametrize("damage", first_always(["flipped", "gone", "cut"], 2))
def test_damaged_unfinished_work_is_never_gone_on_with(corpus_folder, tmp_path, damage):
    kill_at(corpus_folder, tmp_path / "out", 10)
    partial = tmp_path / "out.partial"
    record = json.loads((partial / unfinished.RECORD_FILE).read_text())
    last = record["splits"]["train"]["shards"][-1]
    path = partial / last["file"]
    contents = bytearray(path.read_bytes())
    contents[0] ^= 1
    path.write_bytes({"cut": bytes(2), "flipped": bytes(contents), "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=last["file"]):
        prepare(corpus_folder, out=tmp_path / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_unfinished_work_in_use_is_left_alone(corpus_folder, tmp_path):
    kill_at(corpus_folder, tmp_path / "out", 10)
    with (
        FolderLock(tmp_path / "out.partial" / ".polysketch-lock"),
        pytest.raises(FileExistsError, match="no other process at work"),
    ):
        prepare(corpus_folder, out=tmp_path / "out", **SETTINGS)


def test_progress_goes_on_where_it_was_and_shows_the_time_left(corpus_folder, tmp_path, capsys, impatient, monkeypatch):
    kill_at(corpus_folder, tmp_path / "out", 20)
    made = []

    def remembered(*arguments, **options):
        made.append(Progress(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("polysketch.data.preparation.Progress", remembered)
    prepare(corpus_folder, out=tmp_path / "out", **(SETTINGS | {"progress": True}))
    shown = capsys.readouterr().err.splitlines()
    assert 0.1 < made[-1].began_at / made[-1].total < 0.9
    assert "preparing  100.0 %" in shown[-1]
    assert "MB/s" in shown[-1]
    assert shown[-1].endswith(" left")


# Places


LIMITS = [
    Selection(),
    Selection(max_documents=7),
    Selection(max_text_bytes=20_000),
    Selection(splits=("validation", "test")),
]


@pytest.fixture
def mixed_folder(write_files, texts) -> Path:
    """Files of several kinds, with empty documents between."""
    lines = [json.dumps({"text": text if number % 5 else ""}) for number, text in enumerate(texts[:30])]
    files = {f"{number}.txt": text for number, text in enumerate(texts[30:40])}
    return write_files({"a.jsonl": "\n".join(lines), "b.jsonl": "\n".join(lines[3:14]), **files})


@pytest.mark.parametrize("selection", LIMITS)
def test_from_any_place_on_the_rest_is_what_is_left(mixed_folder, selection):
    def corpus():
        return Corpus(
            [str(mixed_folder), str(mixed_folder / "a.jsonl")], ReadOptions(), SplitRule(), selection=selection
        )

    first = corpus()
    found, places = [], []
    for document in first.documents():
        found.append(document)
        places.append(first.place())
    assert len(found) > 3
    for number, place in enumerate(places):
        other = corpus()
        place = Place.from_dict(json.loads(json.dumps(place.to_dict())))
        assert other.still_has(place)
        assert list(other.documents(place)) == found[number + 1 :]
        assert other.skipped == first.skipped
        assert other.split_by_hash == first.split_by_hash
        assert other.source_bytes == first.source_bytes


def test_the_bytes_of_the_files_are_counted_compressed_or_not(mixed_folder, write_files, texts):
    import gzip

    (mixed_folder / "c.txt.gz").write_bytes(gzip.compress(texts[41].encode()))
    corpus = Corpus([str(mixed_folder)], ReadOptions(), SplitRule())
    assert len(list(corpus.documents())) > 40
    assert corpus.source_bytes == corpus.known_bytes() == sum(path.stat().st_size for path in mixed_folder.iterdir())
