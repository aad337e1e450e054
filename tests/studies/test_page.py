"""The page of studies: every entry, every study, and of each record folder its table, its pictures and its line."""

import json

from polysketch.studies.catalogue import ENTRIES, STUDIES, study_called
from polysketch.studies.page import page


def test_a_page_has_every_study_and_what_its_records_say(tmp_path):
    folders = {"reversal-cpu": True, "reversal-cpu+steps=3": False, "recall-short": None, "reversal-of-words-cpu": True}
    for name, holds in folders.items():
        study, _, size = name.rpartition("-")
        summary = {
            "study": study,
            "size": size,
            "told": "pairs 4" if study == "recall" else "",
            "papers": {},
            "own_rows": 1,
            "of_rows": 2,
            "ours": f"figure of {name}",
            "holds": holds,
            "rows": 1,
            "runs": 1,
            **({"why_open": "softmax not measured"} if holds is None else {}),
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        (tmp_path / name / "table.md").write_text(f"| table of {name} |\n\nA line.\n")
        (tmp_path / name / "loss-by-step.png").touch()
    text = page(tmp_path, "../records")
    assert all(f"| {entry.claim} |" in text for entry in ENTRIES)
    sections = dict(part.split("\n\n", 1) for part in text.split("\n\n## ")[1:])
    assert sections.keys() == STUDIES.keys()
    for name, section in sections.items():
        assert section.startswith(f"{study_called(name).claim} Paper: {study_called(name).paper}.")
        assert ("No record yet." in section) == (name not in ("reversal", "recall"))
    told = sections["reversal"]
    assert told.index("### reversal, cpu\n") < told.index("| table of reversal-cpu |") < told.index("cpu+steps=3\n")
    assert "figure of reversal-cpu: holds." in told
    assert "figure of reversal-cpu+steps=3: does not hold." in told
    assert "![loss by step](../records/reversal-cpu+steps=3/loss-by-step.png)" in told
    assert "A line." not in text
    assert "of-words" not in text  # another study's, though its name begins alike
    assert "figure of recall-short: open (softmax not measured). Size: pairs 4. " in sections["recall"]
