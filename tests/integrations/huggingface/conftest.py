"""Small models of four kinds, trained until they go on counting, and transformers kept quiet."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_model, save_model
from transformers.utils import logging

from integrations.huggingface.counting import KINDS, SHOWN, train_counting, untrained
from integrations.huggingface.runs import make_run_in
from once import made_once
from pictures import no_pixels, pixels  # noqa: F401  (fixtures)
from polysketch.integrations.huggingface import PolysketchForCausalLM


@pytest.fixture(scope="session")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PolysketchForCausalLM]:
    """A function that gives the trained model of a kind; each is trained once, whichever process needs it first."""
    trained: dict[str, PolysketchForCausalLM] = {}

    def train(folder: Path, kind: str) -> None:
        save_model(train_counting(kind), str(folder / "model.safetensors"))

    def get(kind: str) -> PolysketchForCausalLM:
        if kind not in trained:
            folder = made_once(tmp_path_factory, f"counting-{kind}", partial(train, kind=kind))
            model = untrained(kind).double().eval()
            load_model(model, folder / "model.safetensors")
            trained[kind] = PolysketchForCausalLM.from_transformer(model)
        return trained[kind]

    return get


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.full] * (kind not in SHOWN)) for kind in KINDS])
def model(request: pytest.FixtureRequest, counting_model: Callable[[str], PolysketchForCausalLM]) -> Any:
    """The trained model of each kind, the others in the full product; not to be changed."""
    return counting_model(request.param)


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A function that gives a short run with a kind of tokenizer, and its data; each is made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(kind: str = "bytes") -> tuple[Path, Path]:
        if kind not in made:
            made[kind] = make_run_in(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """No progress bars and no advice."""
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
