"""Studies whose rows may have two training runs, the second of which begins with the weights of the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch.studies.arena import LISTOPS_LEARNED
from polysketch.studies.rows import parsed
from polysketch.studies.study import Record, Verdict
from polysketch.studies.task_study import FEW, TaskSettings, TaskStudy, training_of
from polysketch.studies.verdicts import Figures
from polysketch.tasks import Task
from polysketch.training import TrainingConfig

_PRETRAINED = "pretrained"
_EXACT = "exact"


@dataclass(frozen=True)
class PretrainedSettings(TaskSettings):
    """One size.

    Attributes:
        pretraining: steps of finding hidden tokens.
    """

    pretraining: int = 1000


class PretrainedStudy(TaskStudy):
    """A row with `pretrained=true` learns to find hidden tokens of the task's inputs first.

    Arguments are those of `TaskStudy`.
    """

    own_options = (*TaskStudy.own_options, _PRETRAINED)

    def trainings(
        self,
        row: str,
        seed: int,
        settings: PretrainedSettings,  # type: ignore[override]  # the sizes of this study have no others
        folder: Path,
        task: Task,
    ) -> list[TrainingConfig]:
        """The task from scratch; or hidden tokens and then the task, which takes the encoder over."""
        refuse_shorter(settings)
        last = super().trainings(row, seed, settings, folder, task)
        if not parsed(row)[1].get(_PRETRAINED):
            return last
        hidden = dataclasses.replace(
            last[0], objective="masked", out=folder / "hidden", steps=settings.pretraining, warmup=None
        )
        return [hidden, dataclasses.replace(last[0], init_from=hidden.out)]

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By what pre-training adds to the mean accuracy of every row that was made both ways.

        The claim is about all of them: one that gains nothing refutes it. Rows that have learned the task neither way,
        by `learned`, say nothing.
        """
        accuracy = Figures.of_records(records, "accuracy").of
        both = {_from_scratch(row): row for row in accuracy if parsed(row)[1].get(_PRETRAINED)}
        gains = {first: accuracy[row] - accuracy[first] for first, row in both.items() if first in accuracy}
        if not gains:
            return Verdict(", ".join(f"{row} {100 * figure:.1f} %" for row, figure in accuracy.items()), None)
        told = ", ".join(f"{first} {100 * gain:+.1f} %" for first, gain in gains.items())
        learned = {first for first, gain in gains.items() if accuracy[first] + max(gain, 0) >= self.learned}
        if any(gains[first] <= 0 for first in learned):
            return Verdict(told, False)
        return Verdict(told, *self._of_all(accuracy, [first for first in gains if first not in learned]))

    def _of_all(self, accuracy: Mapping[str, float], unlearned: Sequence[str]) -> tuple[bool | None, str]:
        """Whether every row of the study was made and learned, and what is left."""
        missing = sum(row not in accuracy for row in self.rows)
        if missing:
            return None, f"{missing} of {len(self.rows)} rows not measured"
        return (None, f"{' and '.join(unlearned)} not learned") if unlearned else (True, "")


def _from_scratch(row: str) -> str:
    """The row without pre-training."""
    return "+".join(part for part in row.split("+") if part.partition("=")[0] != _PRETRAINED)


def refuse_shorter(settings: TaskSettings) -> None:
    """These studies have a first run of another kind.

    Raises:
        ValueError: shorter rows to learn from first.
    """
    if settings.shorter:
        raise ValueError("shorter: expected none in a study of two runs")


_BOTH_WAYS = ("softmax", "polysketch-paper", "linear", "llops", "performer")

LISTOPS_PRETRAINED = PretrainedStudy(
    "listops",
    claim="An encoder that learned to find hidden tokens of ListOps answers more of it than one from scratch.",
    paper="LLOPS, section 4.1, trains all models so, after Amos et al.",
    learned=LISTOPS_LEARNED,
    mechanisms=_BOTH_WAYS,
    besides=[f"{name}+{_PRETRAINED}=true" for name in _BOTH_WAYS],
    sizes={
        "smoke": PretrainedSettings(task={"shortest": 5, "length": 60}, nearby=0, pretraining=2, **FEW),
        "cpu": PretrainedSettings(
            task={"shortest": 20, "length": 200}, nearby=0, steps=1000, pretraining=1000, learning_rate=1e-3
        ),
        "gpu": PretrainedSettings(
            task={}, layers=4, nearby=0, steps=10_000, pretraining=10_000, batch_size=64, learning_rate=1e-3
        ),
    },
)


class ExactFirstStudy(TaskStudy):
    """A row with `exact=0.25` trains a quarter of the steps by the exact polynomial, and goes on with its sketch.

    Arguments are those of `TaskStudy`.
    """

    own_options = (*TaskStudy.own_options, _EXACT)

    def check_row(self, row: str) -> None:
        """As the base class; the share is between 0 and 1, and the mechanism is a sketch of the polynomial."""
        super().check_row(row)
        name, given = parsed(row)
        share = given.get(_EXACT)
        if share is not None and (name != "polysketch-paper" or not isinstance(share, float) or not 0 < share < 1):
            raise ValueError(f"expected polysketch-paper beside a share {_EXACT} of the steps between 0 and 1: {row!r}")

    def trainings(self, row: str, seed: int, settings: TaskSettings, folder: Path, task: Task) -> list[TrainingConfig]:
        """One run; or a polynomial and then its sketch, which begins anew while all other weights are taken over."""
        refuse_shorter(settings)
        whole = super().trainings(row, seed, settings, folder, task)
        share = parsed(row)[1].get(_EXACT)
        if share is None:
            return whole
        exact = max(1, round(share * settings.steps))
        degree: dict[str, Any] = {"degree": self.options_of(row, settings).get("degree", 4)}
        first = training_of(
            "polynomial",
            degree,
            seed,
            settings,
            folder,
            task,
            steps=exact,
            out=folder / "exact",
            rotary=whole[0].rotary,
            attention_every=whole[0].attention_every,
        )
        rest = {"steps": settings.steps - exact, "init_from": first.out, "init_new": ("feature_map",)}
        return [first, dataclasses.replace(whole[0], **rest)]


EXACT_FIRST = ExactFirstStudy(
    "recall",
    claim="A learned sketch that begins with the weights of the exact polynomial recalls what lies beyond its chunks.",
    paper="none: version 1, section 6, proposes it",
    wanted=0.99,
    judged=f"polysketch-paper+{_EXACT}=0.25",
    mechanisms=("polynomial", "polysketch-paper"),
    besides=[f"polysketch-paper+{_EXACT}={share}" for share in (0.1, 0.25, 0.5)],
    sizes={
        "smoke": TaskSettings(task={"length": 32, "pairs": 2, "vocabulary": 16, "minimum_gap": 8}, nearby=4, **FEW),
        "cpu": TaskSettings(task={"length": 96, "pairs": 8, "vocabulary": 32, "minimum_gap": 32}, steps=1200),
        "gpu": TaskSettings(task={"length": 512, "pairs": 64}, steps=20_000, batch_size=256),
    },
)
