"""The six tasks of MAD (Poli et al. 2024), at the sizes of its baselines.

Sizes: `smoke` is a few steps, `cpu` minutes a row, `paper` the published configurations: 200 epochs in batches of 128.
"""

from __future__ import annotations

from typing import Any

from polysketch.studies.task_study import FEW, TaskSettings, TaskStudy

_NEAR: dict[str, Any] = {"judged": "polysketch", "behind_softmax": 0.02, "learned": 0.5}
"""Claims that compare two models say little of a task of which both answer less than half."""

_PAPER = "accuracies are in its drawings alone"


def _paper(task: dict[str, Any], examples: int = 12_800) -> TaskSettings:
    """The second of its three learning rates."""
    return TaskSettings(
        task={**task, "examples": examples},
        steps=200 * examples // 128,
        batch_size=128,
        learning_rate=5e-4,
        test_rows=1_280,
        training={"schedule": "cosine"},
    )


IN_CONTEXT_RECALL = TaskStudy(
    "in-context-recall",
    claim="Keys that come again are answered by polysketch.",
    paper=_PAPER,
    wanted=0.99,
    judged="polysketch",
    sizes={
        "smoke": TaskSettings(task={"length": 24, "vocabulary": 8}, nearby=4, **FEW),
        "cpu": TaskSettings(task={}, steps=1000),
        "paper": _paper({}),
    },
)

_NOISE = {"noise_vocabulary": 16, "noise_share": 0.2}

NOISY_RECALL = TaskStudy(
    "in-context-recall",
    claim="Keys that come again among noise are answered by polysketch.",
    paper=_PAPER,
    wanted=0.99,
    judged="polysketch",
    sizes={
        "smoke": TaskSettings(task={"length": 24, "vocabulary": 8, **_NOISE}, nearby=4, **FEW),
        "cpu": TaskSettings(task=dict(_NOISE), steps=1000),
        "paper": _paper(_NOISE),
    },
)

_MOTIFS = {"key_motif": 3, "value_motif": 3}

FUZZY_RECALL = TaskStudy(
    "in-context-recall",
    claim="Keys of several tokens are answered by values of several, by polysketch within 2 % of softmax.",
    paper=_PAPER,
    **_NEAR,
    sizes={
        "smoke": TaskSettings(task={"length": 48, "vocabulary": 8, **_MOTIFS}, nearby=4, **FEW),
        "cpu": TaskSettings(task=dict(_MOTIFS), steps=2000),
        "paper": _paper(_MOTIFS),
    },
)

MAD_COPYING = TaskStudy(
    "selective-copying",
    claim="16 tokens out of 256 are copied by polysketch within 2 % of softmax.",
    paper=_PAPER,
    **_NEAR,
    sizes={
        "smoke": TaskSettings(task={"length": 32, "content": 4}, nearby=4, **FEW),
        "cpu": TaskSettings(task={"length": 256}, steps=1000),
        "paper": _paper({"length": 256}),
    },
)

COMPRESSION = TaskStudy(
    "compression",
    claim="A row of 32 tokens is read out of one vector, by polysketch within 2 % of softmax.",
    paper=_PAPER,
    **_NEAR,
    sizes={
        "smoke": TaskSettings(task={"length": 8}, nearby=4, **FEW),
        "cpu": TaskSettings(task={}, steps=2000),
        "paper": _paper({}),
    },
)

MEMORIZATION = TaskStudy(
    "memorization",
    claim="Values that no row tells are kept in weights, by polysketch within 2 % of softmax.",
    paper=_PAPER,
    **_NEAR,
    sizes={
        "smoke": TaskSettings(task={"length": 8, "vocabulary": 17}, nearby=4, **FEW),
        "cpu": TaskSettings(task={}, steps=1000),
        "paper": _paper({}, examples=256),
    },
)
