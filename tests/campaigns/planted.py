"""Faults that a campaign has to find, each planted in the process of a command."""

import contextlib
from pathlib import Path

from polysketch.storage import disk
from polysketch.training.metrics_file import MetricsFile


def no_sync() -> None:
    """Nothing is waited for to be on the disk."""
    disk.sync = lambda path: None


def early_name() -> None:
    """Files and folders have their names before they are written."""
    disk.temporary_name = lambda path: path


def metrics_twice() -> None:
    """A resumed run leaves the lines of steps that it makes again."""
    MetricsFile.drop_after = lambda self, step: 0


def swallowed() -> None:
    """What cannot be written is left out without a word."""
    write = Path.write_bytes

    def quiet(self, data):
        with contextlib.suppress(OSError):
            write(self, data)

    Path.write_bytes = quiet


def half_names() -> None:
    """Records are written where the earlier ones stand."""
    disk.replace_file = lambda path, data: path.write_bytes(data)


def unexplained() -> None:
    """An error that no command explains."""

    def rename(source, target):
        try:
            source.rename(target)
        except OSError as error:
            raise KeyError(str(target)) from error

    disk.rename = rename
