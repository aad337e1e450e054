"""What calls import late is imported before they are forked: a call takes a tenth of a second then, not seconds.

Nothing is computed here, so a fork copies no other thread and no lock that one holds. A fault that needs the late
import is beyond such a fork; processes that Python starts anew are there for those.
"""

import contextlib
import gc
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from campaigns.isolated import isolated


def import_ahead(work: Callable[[], Any], seconds: int) -> None:
    """Import what a call imports, which a fork of this process tells."""
    for name in _imported_by(work, seconds):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection copies what a fork shares with this process


def _imported_by(work: Callable[[], Any], seconds: int) -> list[str]:
    known = set(sys.modules)

    def telling() -> None:
        try:
            work()
        finally:
            print("\n" + json.dumps([name for name in list(sys.modules) if name not in known]))

    last = isolated(telling, seconds=seconds).output.rstrip("\n").rpartition("\n")[2]
    return json.loads(last) if last.startswith("[") else []
