"""A small trained-looking run and its data, for the commands that read a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pictures import no_pixels, pixels  # noqa: F401  (fixtures)
from polysketch.data import PreparedData, TokenizerLike, prepare
from polysketch.models import ModelConfig, TransformerLM

TEXT = "Näive façade, 10 € — 日本語 🙂. The quick brown fox jumps over the lazy dog.\n" * 8


@dataclass(frozen=True)
class StandInDescription:
    """What `load_model` returns beside the model."""

    data: Path
    tokenizer: TokenizerLike
    context_length: int = 64
    step: int = 7


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text prepared as bytes, with all three splits."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "validation", "test"):
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "text.txt").write_text(f"{split}\n{TEXT}", encoding="utf-8")
    prepare([folder / "text"], "bytes", folder / "prepared", progress=False)
    return folder / "prepared"


@pytest.fixture(scope="session")
def small_model() -> TransformerLM:
    """A model of bytes, as it was initialised."""
    torch.manual_seed(0)
    return TransformerLM(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="softmax"))


@pytest.fixture
def stand_in_run(monkeypatch: pytest.MonkeyPatch, data_folder: Path, small_model: TransformerLM) -> Callable[..., None]:
    """Let a command's `load_model` find a model without a run folder."""
    tokenizer = PreparedData.open(data_folder).tokenizer

    def install(model: torch.nn.Module = small_model, data: Path = data_folder) -> None:
        description = StandInDescription(data, tokenizer)

        def load_model(run: Path, *, device: str, checkpoint: str) -> tuple[torch.nn.Module, StandInDescription]:
            if run != Path("run"):
                raise FileNotFoundError(f"expected a run folder, found nothing at {run}")
            return model, description

        def find_run(run: Path, checkpoint: str) -> tuple[dict, Path]:
            load_model(run, device="cpu", checkpoint=checkpoint)
            return {"data": {}}, run

        monkeypatch.setattr("polysketch.training.load_model", load_model)
        monkeypatch.setattr("polysketch.training.run_folder.find_run", find_run)

    return install
