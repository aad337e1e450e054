"""Small models and their graphs as files of ONNX, each made once."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from integrations.graphs.small import Exported, small
from polysketch.integrations.graphs.folder import manifest, write_model


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """A function that gives the exported model of a kind, a key of `KINDS`; each is written once."""
    logging.getLogger("torch.__trace").propagate = False  # else pytest keeps every line of it
    made: dict[str, Exported] = {}

    def get(kind: str) -> Exported:
        if kind not in made:
            model, folder = small(kind), Path(tmp_path_factory.mktemp(kind))
            spans, files = write_model(model, folder, "onnx")
            made[kind] = Exported(model, folder, manifest(spans, "onnx", files))
        return made[kind]

    return get
