"""What the runs of a study share: made once, however many start together."""

import time
from concurrent.futures import ThreadPoolExecutor

from polysketch.data import prepare
from polysketch.storage import FolderLock
from polysketch.studies.in_turn import LOCK_FILE, one_at_a_time
from polysketch.studies.texts import prepared_once

TOGETHER = 3


def test_runs_that_start_together_make_a_text_once_and_all_of_them_read_it(tmp_path):
    # Every lock has a descriptor of its own, so threads exclude each other as processes do.
    source, made = tmp_path / "text.txt", []
    source.write_text("polysketch " * 400)

    def make(out):
        made.append(out)
        time.sleep(0.2)
        return prepare([source], "bytes", out, validation_share=0, test_share=0)

    def prepared(_):
        return prepared_once(tmp_path / "runs", "text", {"tokenizer": "bytes"}, make)

    with ThreadPoolExecutor(TOGETHER) as pool:
        opened = list(pool.map(prepared, range(TOGETHER)))
    assert len(made) == 1
    assert {data.folder for data in opened} == set(made)
    assert prepared(None).sha256 == opened[0].sha256


def test_who_waits_says_so_once_and_goes_on_when_the_other_has_let_go(tmp_path, capsys, monkeypatch):
    naps, other = [], FolderLock(tmp_path / LOCK_FILE)

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            other.__exit__(None, None, None)

    monkeypatch.setattr("polysketch.studies.in_turn.time.sleep", nap)
    other.__enter__()
    with one_at_a_time(tmp_path):
        assert len(naps) == 2
    assert capsys.readouterr().err.count("waiting for another process") == 1
