"""The notebook is its page, and its cells run from top to bottom without Jupyter."""

import json
import runpy

import pytest

from docs.pages import ROOT

MADE = runpy.run_path(str(ROOT / "docs" / "notebook.py"))


@pytest.fixture(scope="module")
def kept() -> dict:
    return json.loads(MADE["NOTEBOOK"].read_text(encoding="utf-8"))


def test_the_notebook_is_the_page_as_it_is(kept):
    """Else `python docs/notebook.py` was forgotten."""
    assert kept == MADE["notebook"]()


def test_its_cells_run_and_end_in_a_plot(kept, tmp_path, monkeypatch, capsys):
    """Two steps are enough to see every cell run."""
    monkeypatch.chdir(tmp_path)
    cells = ["".join(cell["source"]) for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4
    namespace: dict = {}
    for number, code in enumerate(cells):
        shortened = code.replace("STEPS = 256, 4, 20", "STEPS = 32, 2, 2")
        assert (shortened != code) == (number == 0)
        exec(compile(shortened, f"cell {number}", "exec"), namespace)
    assert (tmp_path / "mechanisms.png").stat().st_size > 5_000
    assert capsys.readouterr().out.count("held-out loss") == len(namespace["MECHANISMS"]) == 3
