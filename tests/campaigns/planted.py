"""Faults that a campaign has to find, each planted in the process of a command."""

from polysketch.storage import disk
from polysketch.training.reporting import MetricsFile


def no_sync() -> None:
    """Nothing is waited for to be on the disk."""
    disk.sync = lambda path: None


def early_name() -> None:
    """Files and folders have their names before they are written."""
    disk.temporary_name = lambda path: path


def metrics_twice() -> None:
    """A resumed run leaves the lines of steps that it makes again."""
    MetricsFile.drop_after = lambda self, step: 0
