"""The benchmark of `prepare --workers` runs, and compares the files."""

import json

import pytest

from benchmarks import preparing


@pytest.mark.full  # tests/data/test_workers.py compares the files of several workers
def test_it_writes_its_figures_and_refuses_other_bytes(tmp_path, monkeypatch):
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {number} of a few words"}) + "\n" for number in range(100)))
    out = tmp_path / "preparing.json"
    arguments = [str(text), "--tokenizers", "bpe:300", "--repeats", "1", "--out", str(out)]
    assert preparing.main(arguments) == 0
    (measured,) = json.loads(out.read_text())["measurements"]
    assert (measured["tokenizer"], measured["megabytes"]) == ("bpe:300", 0.0)
    assert measured["rate_of_2_over_1"] > 0
    right = preparing.command
    monkeypatch.setattr(preparing, "command", lambda *given: [*right(*given), "--max-documents", "3"])
    with pytest.raises(AssertionError, match=r"1 workers: train\.bin differs"):
        preparing.main(arguments)
