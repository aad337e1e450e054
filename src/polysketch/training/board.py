"""Metrics for TensorBoard, when it is installed."""

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NOT_SHOWN = ("kind", "step")


class Board:
    """Writes lines of metrics as TensorBoard scalars.

    Args:
        folder: where its files go.
        first_step: what earlier processes wrote about later steps is hidden.
        enabled: False, or TensorBoard missing: nothing is written.
    """

    def __init__(self, folder: Path, *, first_step: int, enabled: bool) -> None:
        self._writer = _make_writer(folder, first_step) if enabled and importlib.util.find_spec("tensorboard") else None

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of metrics."""
        if self._writer is not None:
            for name, value in _scalars(line):
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def _make_writer(folder: Path, first_step: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own imports warn of deprecations that no user can act on
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in `line`; of the prefix's shares, the mean over the heads of each layer."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/layer {key}", sum(heads) / len(heads)) for key, heads in value.items())
        elif name not in _NOT_SHOWN and value is not None:
            yield name, value
