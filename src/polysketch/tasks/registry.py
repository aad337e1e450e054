"""The table of tasks that are made from a seed. Loads none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polysketch.tasks.base import GeneratedTask

TASKS = {
    "selective-copying": "copying.SelectiveCopying",
    "induction": "induction.Induction",
    "recall": "associative_recall.AssociativeRecall",
    "reversal": "reversal.Reversal",
    "listops": "listops.ListOps",
    "in-context-recall": "mad.InContextRecall",
    "memorization": "mad.Memorization",
    "compression": "mad.Compression",
}
"""By name, the class of each, beside this file."""


def task_class(name: str) -> type[GeneratedTask]:
    """The class of a task.

    Raises:
        ValueError: no such task; the message lists them.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; known tasks: {', '.join(TASKS)}")
    module, _, found = TASKS[name].rpartition(".")
    return getattr(importlib.import_module(f"polysketch.tasks.{module}"), found)
