"""The studies of tasks.

Sizes: `smoke` is a few steps, `cpu` what two cores do in some evenings, `gpu` for one GPU, `paper` the paper's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysketch.data.tokenization import BytesTokenizer
from polysketch.studies.task_study import TaskSettings, TaskStudy
from polysketch.tasks import Task
from polysketch.tasks.sources import classified_texts, split_off

_STEPS: dict[str, Any] = {"steps": 2, "batch_size": 4, "evaluations": 1, "test_rows": 8, "layers": 1}

SELECTIVE_COPYING = TaskStudy(
    "selective-copying",
    claim="Selective copying is learned by polysketch as by softmax.",
    paper="softmax 99.7 %, degree 4 99.9 % at 4,096 tokens",
    wanted=0.99,
    judged="polysketch",
    sizes={
        "smoke": TaskSettings(task={"length": 32, "content": 4, "minimum_gap": 8}, nearby=4, **_STEPS),
        "cpu": TaskSettings(
            task={"length": 1024, "minimum_gap": 128},
            nearby=64,
            steps=4000,
            batch_size=8,
            evaluations=40,
            test_rows=256,
        ),
        "gpu": TaskSettings(task={"length": 4096}, nearby=64, steps=20_000, batch_size=64, evaluations=100),
        "paper": TaskSettings(task={"length": 4096, "examples": 64_000}, nearby=0, steps=400_000, batch_size=64),
    },
)

INDUCTION = TaskStudy(
    "induction",
    claim="Induction heads are learned by polysketch as by softmax.",
    paper="100 % at 128 and 256 tokens",
    wanted=0.999,
    judged="polysketch",
    sizes={
        "smoke": TaskSettings(task={"length": 32, "minimum_gap": 8}, nearby=4, lengths=(48,), **_STEPS),
        "cpu": TaskSettings(
            task={"length": 256, "minimum_gap": 32},
            steps=400,
            lengths=(128, 512, 1024),
            test_rows=256,
        ),
        "gpu": TaskSettings(task={"length": 256}, steps=20_000, batch_size=256, lengths=(128, 1024, 4096)),
        "paper": TaskSettings(task={"length": 256}, nearby=0, steps=400_000, batch_size=64, lengths=(128,)),
    },
)

RECALL = TaskStudy(
    "recall",
    claim="Keys from far back are recalled by polysketch as by softmax.",
    paper="LLOPS 93.2 % at d = 128, p = 4",
    wanted=0.99,
    judged="polysketch",
    sizes={
        "smoke": TaskSettings(
            task={"length": 32, "pairs": 2, "vocabulary": 16, "minimum_gap": 8}, nearby=4, state_at=(32, 64), **_STEPS
        ),
        "cpu": TaskSettings(task={"length": 96, "pairs": 8, "vocabulary": 128, "minimum_gap": 32}, steps=400),
        "short": TaskSettings(
            task={"length": 64, "pairs": 4, "vocabulary": 32, "minimum_gap": 32},
            steps=600,
            evaluations=60,
            state_at=(1_024, 8_192),
        ),
        "eight": TaskSettings(
            task={"length": 96, "pairs": 8, "vocabulary": 32, "minimum_gap": 32},
            steps=600,
            evaluations=60,
            state_at=(1_024, 8_192),
        ),
        "gpu": TaskSettings(task={"length": 512, "pairs": 64}, steps=20_000, batch_size=256),
    },
)

IN_CONTEXT_RECALL = TaskStudy(
    "in-context-recall",
    claim="Keys that come again are answered by polysketch.",
    paper="attention solves it",
    wanted=0.99,
    judged="polysketch",
    sizes={
        "smoke": TaskSettings(task={"length": 24, "vocabulary": 8}, nearby=4, **_STEPS),
        "cpu": TaskSettings(task={}, steps=1000),
        "paper": TaskSettings(task={"examples": 12_800}, steps=20_000, batch_size=128, learning_rate=5e-4),
    },
)

REVERSAL = TaskStudy(
    "reversal",
    claim="An encoder of one layer learns to reverse 50 digits.",
    paper="x^8 4e-6, softmax 5e-6, elu 0.09 nats",
    wanted=1e-5,
    by_loss=True,
    # Its figures: x^2, x^4, x^8; squares of 1 + ... + x^d; learned ones. A learned one is fixed by giving coefficients.
    besides=(
        *(f"polynomial+degree={degree}" for degree in (2, 8)),
        *(f"squared-polynomial+coefficients={degree}" for degree in (1, 2, 4, 5, 6)),
        *(f"squared-polynomial+coefficients={degree}+learned=True" for degree in (1, 2, 3, 4, 5, 6)),
    ),
    sizes={
        "smoke": TaskSettings(task={"length": 8}, nearby=0, **_STEPS),
        "cpu": TaskSettings(task={}, layers=1, nearby=0, steps=3000, learning_rate=2e-3, test_rows=1_000),
        "paper": TaskSettings(task={}, layers=1, nearby=0, steps=10_000, batch_size=128, learning_rate=2e-3),
    },
)

LISTOPS = TaskStudy(
    "listops",
    claim="An encoder with attention in linear time learns ListOps within 2 % of softmax.",
    paper="LLOPS, table 1",
    behind_softmax=0.02,
    sizes={
        "smoke": TaskSettings(task={"shortest": 5, "length": 60}, nearby=0, **_STEPS),
        "cpu": TaskSettings(task={"shortest": 20, "length": 200}, nearby=0, steps=2000, learning_rate=1e-3),
        "gpu": TaskSettings(task={}, layers=4, nearby=0, steps=20_000, batch_size=64, learning_rate=1e-3),
    },
)


class _Reviews(TaskStudy):
    """Reviews of films, out of POLYSKETCH_DATA."""

    @property
    def asks(self) -> str:
        """A class."""
        return "class"

    def task_of(self, settings: TaskSettings, seed: int) -> Task:
        """Bytes of 2,000 reviews to train on, of which a tenth is kept for validation, and 1,000 to test."""
        folder = os.environ.get("POLYSKETCH_DATA")
        if not folder:
            raise ValueError("expected the environment variable POLYSKETCH_DATA to name the folder of data, found none")
        files = {"train": "imdb_train_2000.jsonl.gz", "test": "imdb_test_1000.jsonl.gz"}
        sources: dict[str, Sequence[Path]] = {split: [Path(folder) / "lra" / name] for split, name in files.items()}
        tokenizer = BytesTokenizer()
        task = classified_texts(sources, tokenizer.encode, tokenizer.vocab_size, **settings.task)
        return split_off(task, 0.1, seed)


REVIEWS = _Reviews(
    "reviews",
    claim="An encoder with attention in linear time classifies reviews by their bytes within 2 % of softmax.",
    paper="LLOPS, table 1",
    behind_softmax=0.02,
    sizes={
        "smoke": TaskSettings(task={"max_tokens": 50}, nearby=0, **_STEPS),
        "cpu": TaskSettings(task={"max_tokens": 1000}, nearby=0, steps=1000, batch_size=16, learning_rate=1e-3),
    },
)
