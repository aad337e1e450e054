"""What a run learns: of which data, by which model, and how that is measured."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polysketch.distributed.processes import Processes
from polysketch.training.config import TrainingConfig
from polysketch.training.run_folder import RunFolder

_CALIBRATION_ROWS = 8


class Goal(ABC):
    """One kind of data with its model. The trainer knows no more of either than this.

    Attributes:
        config: the run's options.
        sizes: configuration of the model; it has `to_dict` and `from_dict`.
    """

    config: TrainingConfig
    sizes: Any

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Where the data is, and a sha256 that all of it has a part in; JSON values."""

    @abstractmethod
    def verify(self) -> None:
        """Read all of the data and compare its sha256.

        Raises:
            ValueError: a file was altered; it is named.
        """

    @abstractmethod
    def check_layers(self, model: Any, processes: Processes) -> None:
        """Refuse a model that these processes, or these rows, cannot be computed by.

        Raises:
            ValueError: says what to change.
        """

    @abstractmethod
    def build_model(self) -> Any:
        """The model on the CPU, with initial weights."""

    @abstractmethod
    def initialize(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """What happens once, before the first step."""

    @abstractmethod
    def rows(self) -> Any:
        """What the run trains on: `batch(step, batch_size)`, a function of the seed and the step alone."""

    @abstractmethod
    def measure(self, model: Any, processes: Processes) -> dict[str, Any]:
        """Figures of the validation split, JSON values; `loss` is one of them. Changes nothing."""

    def measured_by(self) -> dict[str, Any]:
        """What decides how `measure` measures and may change when a run goes on, JSON values by option."""
        return {"eval_tokens": self.config.eval_tokens, "validation": self.config.validation}

    @abstractmethod
    def told(self, figures: Mapping[str, Any]) -> str:
        """Such figures in a few words."""

    @abstractmethod
    def notes(self, model: Any, rows: Any) -> Iterator[str]:
        """What the user should know before the first step."""

    @abstractmethod
    def lay_out(self, run: RunFolder) -> None:
        """Copy into the run folder what its model cannot be used without."""

    def is_of(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved configuration of a model is this one; options added since then have their defaults."""
        return type(self.sizes).from_dict(saved).to_dict() == self.sizes.to_dict()


def calibration_rows(config: TrainingConfig) -> int:
    """How many rows calibrate prefix gains: few, for they are computed at once, whatever --accumulation says."""
    return min(config.batch_size, _CALIBRATION_ROWS)


def facts_of(goal: Goal, folder: Path) -> dict[str, Any]:
    """What config.json says of a goal: its model and its data."""
    return {"model": goal.sizes.to_dict(), "data": {"folder": str(folder.resolve()), **goal.describe()}}
