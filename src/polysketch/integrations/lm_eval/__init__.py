"""Our models in lm_eval (EleutherAI's evaluation harness), and its tasks on local files.

Importing this package registers the model `polysketch` with lm_eval. Needs the extra `eval`.
"""

from polysketch.integrations.lm_eval.model import PolysketchLM, room_for, transformers_model
from polysketch.integrations.lm_eval.ruler import RULER_TASKS, RulerTexts
from polysketch.integrations.lm_eval.running import TaskFigure, evaluate_tasks
from polysketch.integrations.lm_eval.tasks import LOCAL_TASKS, LoadedTask, load_tasks

__all__ = [
    "LOCAL_TASKS",
    "RULER_TASKS",
    "LoadedTask",
    "PolysketchLM",
    "RulerTexts",
    "TaskFigure",
    "evaluate_tasks",
    "load_tasks",
    "room_for",
    "transformers_model",
]
