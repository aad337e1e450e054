"""Training runs that survive being killed: options, optimizer, checkpoints, metrics, and loading what they made."""

from polysketch.training.config import TrainingConfig
from polysketch.training.load import RunDescription, load_model
from polysketch.training.trainer import TrainingResult, train

__all__ = ["RunDescription", "TrainingConfig", "TrainingResult", "load_model", "train"]
