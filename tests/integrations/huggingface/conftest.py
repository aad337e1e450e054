"""Small models of four kinds, trained until they go on counting, and transformers kept quiet."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from integrations.huggingface.counting import KINDS, SHOWN, train_counting
from integrations.huggingface.runs import make_run_in
from polysketch.integrations.huggingface import PolysketchForCausalLM


@pytest.fixture(scope="session")
def counting_model() -> Callable[[str], PolysketchForCausalLM]:
    """A function that gives the trained model of a kind; each is trained once."""
    trained: dict[str, PolysketchForCausalLM] = {}

    def get(kind: str) -> PolysketchForCausalLM:
        if kind not in trained:
            trained[kind] = PolysketchForCausalLM.from_transformer(train_counting(kind))
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
