"""The study of pictures: a small vision transformer with one mechanism after the other."""

from __future__ import annotations

from polysketch.studies.task_study import FEW, TaskSettings, TaskStudy
from polysketch.tasks import Task
from polysketch.tasks.shipped import digits
from polysketch.tasks.sources import split_off


class _Digits(TaskStudy):
    """Handwritten digits that scikit-learn ships, in patches."""

    @property
    def asks(self) -> str:
        """The class of a picture."""
        return "picture"

    def task_of(self, settings: TaskSettings, seed: int) -> Task:
        """1,437 pictures to train on, of which a twentieth is kept for validation, and 360 to test."""
        return split_off(digits(**settings.task), 0.05, seed)


IMAGE_CLASSIFICATION = _Digits(
    "image-classification",
    claim="A vision transformer with attention in linear time classifies pictures within 2 % of softmax.",
    paper="ImageNet by PVT-T 75.1 %, with focused 77.8 %, with polarity 78.8 %",
    behind_softmax=0.02,
    learned=0.2,  # of ten classes
    mechanisms=("softmax", "polysketch-paper", "focused", "polarity", "hyper", "linear"),
    sizes={
        "smoke": TaskSettings(task={"patch_size": 4}, nearby=2, **FEW),
        "cpu": TaskSettings(
            task={"patch_size": 2}, nearby=4, steps=400, learning_rate=1e-3, evaluations=10, test_rows=360
        ),
        "gpu": TaskSettings(
            task={"patch_size": 1},
            layers=4,
            nearby=16,
            steps=10_000,
            batch_size=256,
            learning_rate=1e-3,
            evaluations=50,
            test_rows=360,
        ),
    },
)
