"""From a model and data to numbers. Nothing here reads or writes files, and nothing prints."""

from polysketch.evaluation.evaluate import Evaluation, evaluate
from polysketch.evaluation.position import ChunkStartLoss, loss_at_chunk_starts
from polysketch.evaluation.recall import recall_accuracy

__all__ = ["ChunkStartLoss", "Evaluation", "evaluate", "loss_at_chunk_starts", "recall_accuracy"]
