"""Our models in lm_eval (EleutherAI's evaluation harness), and its tasks on local files.

Importing this package registers the model `polysketch` with lm_eval. Needs the extra `eval`.
"""

from polysketch.integrations.lm_eval.model import PolysketchLM, transformers_model
from polysketch.integrations.lm_eval.running import TaskFigure, evaluate_tasks
from polysketch.integrations.lm_eval.tasks import LOCAL_TASKS, load_tasks

__all__ = ["LOCAL_TASKS", "PolysketchLM", "TaskFigure", "evaluate_tasks", "load_tasks", "transformers_model"]
