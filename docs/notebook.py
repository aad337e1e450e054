"""Write the notebook that a page is too: examples/compare_mechanisms.ipynb of own-loop.md.

    python docs/notebook.py

A cell for each block of Python, and one for the text between. No package for notebooks is needed.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "own-loop.md"
NOTEBOOK = ROOT / "examples" / "compare_mechanisms.ipynb"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([\w-]+\.md[^)]*\)")  # pages are not beside the notebook


def notebook() -> dict[str, Any]:
    """The notebook of the page as it is now."""
    parts = _BLOCK.split(PAGE.read_text(encoding="utf-8"))
    cells = [_cell(part.strip("\n"), is_code=bool(place % 2)) for place, part in enumerate(parts) if part.strip()]
    language = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": language, "nbformat": 4, "nbformat_minor": 5}


def _cell(text: str, *, is_code: bool) -> dict[str, Any]:
    lines = (text if is_code else _LINK.sub(r"\1", text)).splitlines(keepends=True)
    cell: dict[str, Any] = {"cell_type": "code" if is_code else "markdown", "metadata": {}, "source": lines}
    return cell | ({"execution_count": None, "outputs": []} if is_code else {})


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
