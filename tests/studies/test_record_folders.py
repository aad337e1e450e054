"""The records in the repository, of earlier commits too, give their tables by the code as it is."""

import json
import shutil
from pathlib import Path

import pytest

from polysketch.studies.catalogue import study_called
from polysketch.studies.study import TABLE_FILE, Verdict, show
from polysketch.studies.summaries import SUMMARY_FILE

FOLDERS = sorted(path.parent for path in (Path(__file__).parents[2] / "studies").glob(f"*/{SUMMARY_FILE}"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_records_give_their_table_and_line(folder, tmp_path):
    pytest.importorskip("matplotlib")
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    assert folder.name == f"{summary['study']}-{summary['size']}"
    table = show(summary["study"], study_called(summary["study"]), summary["size"], tmp_path)
    assert table == (folder / TABLE_FILE).read_text()
    now = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert now == summary  # and so what the list tells of the study is true of it now
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in folder.glob("*.png")}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_without_a_row_that_the_claim_compares_with_nothing_is_said(folder):
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    study = study_called(summary["study"])
    records = [json.loads(path.read_text()) for path in folder.glob("*-seed*.json")]
    made = {one["row"] for one in records}
    for needed in study.needs:
        left = [one for one in records if one["row"] not in (needed, f"{needed}+attention_every=2")]
        verdict = study.verdict(left) if left else Verdict("", None, needed)
        assert verdict.holds is None
        assert needed in verdict.why_open
    assert summary["holds"] is None or made >= set(study.needed(made))
