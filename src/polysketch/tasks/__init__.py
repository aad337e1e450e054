"""Tasks to train and to measure models on: made from a seed, or read from local files, each a folder of its own.

from polysketch.tasks import open_task, write_task
from polysketch.tasks.reversal import Reversal

write_task(Reversal(length=50), "data/reversal")
batch = open_task("data/reversal").rows("train", np.arange(32))
"""

from typing import TYPE_CHECKING

from polysketch.lazy import on_demand
from polysketch.tasks.description import is_task, read_task_description, task_digest
from polysketch.tasks.registry import TASKS, task_class

if TYPE_CHECKING:
    from polysketch.tasks.answered import AnsweredRows, SequenceAnswers
    from polysketch.tasks.base import SPLITS, GeneratedTask, Task
    from polysketch.tasks.batch import Row, TaskBatch
    from polysketch.tasks.folder import open_task, verify_task, write_task
    from polysketch.tasks.rows import TaskRows
    from polysketch.tasks.stored import Classification, ClassifiedRows
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "answered": ["AnsweredRows", "SequenceAnswers"],
            "base": ["SPLITS", "GeneratedTask", "Task"],
            "batch": ["Row", "TaskBatch"],
            "folder": ["open_task", "verify_task", "write_task"],
            "rows": ["TaskRows"],
            "stored": ["Classification", "ClassifiedRows"],
        },
    )

__all__ = [
    "SPLITS",
    "TASKS",
    "AnsweredRows",
    "Classification",
    "ClassifiedRows",
    "GeneratedTask",
    "Row",
    "SequenceAnswers",
    "Task",
    "TaskBatch",
    "TaskRows",
    "is_task",
    "open_task",
    "read_task_description",
    "task_class",
    "task_digest",
    "verify_task",
    "write_task",
]
