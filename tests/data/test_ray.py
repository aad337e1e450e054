"""Preparing on a cluster of Ray gives the bytes of one process. Two nodes of one core are started on this machine."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polysketch.cli import main
from polysketch.data import encoding, prepare, ray_workers, unfinished
from polysketch.data.corpus import Document

SETTINGS = {"tokenizer": "bpe:400", "shard_tokens": 700, "validation_share": 0.2, "test_share": 0.2, "progress": False}


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_ray_the_pip_command_is_named(corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'polysketch\[ray\]'"):
        prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two nodes, to which this process is connected."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    nodes = pytest.importorskip("ray.cluster_utils").Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1500)


@pytest.fixture
def alone(corpus_folder, tmp_path) -> dict[str, bytes]:
    """What one process makes."""
    return contents_of(prepare(corpus_folder, out=tmp_path / "alone", **SETTINGS).folder)


def killed_once(sha256: str, tokenizer: list, documents: list[Document]) -> encoding.Encoded:
    """Kills its own process in the middle of the text, the first time."""
    mark = Path(documents[0].origin).parent.parent / "killed"
    if any(document.origin.endswith("030.txt") for document in documents) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return ORIGINAL(sha256, tokenizer, documents)


def always_killed(sha256: str, tokenizer: list, documents: list[Document]) -> encoding.Encoded:
    os.kill(os.getpid(), signal.SIGKILL)
    return ORIGINAL(sha256, tokenizer, documents)


def losing(sha256: str, tokenizer: list, documents: list[Document]) -> encoding.Encoded:
    raise ValueError(f"found in a task: {documents[0].origin}")


ORIGINAL = ray_workers.encode_remotely


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("cluster", "small_batches")
class TestOnTwoNodes:
    """Slow to start, hence together."""

    @pytest.mark.parametrize("workers", [None, 1, 3])
    def test_the_bytes_are_those_of_one_process(self, corpus_folder, tmp_path, alone, workers):
        made = prepare(corpus_folder, out=tmp_path / "out", ray=True, workers=workers, **SETTINGS)
        assert contents_of(made.folder) == alone

    def test_both_nodes_work(self, corpus_folder, tmp_path, monkeypatch):
        monkeypatch.setattr(ray_workers, "encode_remotely", noting_the_node)
        prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS)
        assert len(list(tmp_path.glob("node-*"))) == 2

    def test_a_killed_task_is_done_again(self, corpus_folder, tmp_path, alone, monkeypatch):
        monkeypatch.setattr(ray_workers, "encode_remotely", killed_once)
        made = prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS)
        assert (tmp_path / "killed").exists()
        assert contents_of(made.folder) == alone

    def test_tasks_that_end_at_every_attempt_are_an_error(self, corpus_folder, tmp_path, monkeypatch):
        monkeypatch.setattr(ray_workers, "encode_remotely", always_killed)
        with pytest.raises(RuntimeError, match=r"ended 3 times at the text from .*000\.txt on"):
            prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS)

    def test_an_error_in_a_task_is_that_of_one_process(self, corpus_folder, tmp_path, monkeypatch):
        monkeypatch.setattr(ray_workers, "encode_remotely", losing)
        with pytest.raises(ValueError, match=r"^found in a task: .*000\.txt$"):
            prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS)

    def test_interrupted_it_goes_on(self, corpus_folder, tmp_path, alone, monkeypatch):
        monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
        write, calls = unfinished.Keeper.keep, iter(range(10**9))

        def interrupted(self, *arguments):
            write(self, *arguments)
            if next(calls) == 8:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(unfinished.Keeper, "keep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS)
        assert (tmp_path / "out.partial" / unfinished.RECORD_FILE).exists()
        assert contents_of(prepare(corpus_folder, out=tmp_path / "out", ray=True, **SETTINGS).folder) == alone

    def test_the_command_has_the_flag(self, corpus_folder, tmp_path):
        arguments = ["prepare", str(corpus_folder), "--tokenizer", "bytes", "--no-progress"]
        assert main([*arguments, "--out", str(tmp_path / "a"), "--ray"]) == 0
        assert main([*arguments, "--out", str(tmp_path / "b")]) == 0
        assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")


def noting_the_node(sha256: str, tokenizer: list, documents: list[Document]) -> encoding.Encoded:
    """Leaves a file with the name of the node it ran on, slowly, so that one node is not enough."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    (Path(documents[0].origin).parent.parent / f"node-{node}").touch()
    time.sleep(0.3)
    return ORIGINAL(sha256, tokenizer, documents)
