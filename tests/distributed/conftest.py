"""What the tests of several processes share: documents of unequal lengths, and options for runs of a second."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polysketch.data import prepare
from polysketch.training import TrainingConfig, trainer


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of training look at them."""
    monkeypatch.setattr(trainer, "plot_loss", lambda lines, path: False)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 3 to 150 bytes: rows of a batch have unequal numbers of tokens to predict."""
    folder = tmp_path_factory.mktemp("documents")
    draw = random.Random(0)
    lines = []
    for number in range(60):
        text = f"{number} " + "".join(draw.choice("abcdef ") for _ in range(draw.choice([1, 9, 20, 37, 147])))
        lines.append(json.dumps({"text": text}) + "\n")
    for split in ("train", "validation"):
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "texts.jsonl").write_text("".join(lines))
    prepare(folder / "text", "bytes", folder / "data", progress=False)
    return folder / "data"


@pytest.fixture
def make_config(data_folder: Path, tmp_path: Path) -> Callable[..., TrainingConfig]:
    """A function that gives the options of a run of about a second, with changes."""

    def make(**changes: Any) -> TrainingConfig:
        options: dict[str, Any] = {
            "data": data_folder,
            "out": tmp_path / "run",
            "layers": 2,
            "attention": "polysketch-paper",
            "attention_options": {"sketch_size": 8, "local_chunk": 16, "prefix_gain": 0.5},
            "context": 48,
            "batch_size": 8,
            "steps": 6,
            "log_every": 1,
            "eval_every": 3,
            "eval_tokens": 500,
            "save_every": 2,
            "device": "cpu",
            "tensorboard": False,
        }
        return TrainingConfig(**options | changes)

    return make
