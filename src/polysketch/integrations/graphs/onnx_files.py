"""The two graphs as files of ONNX, which share one file of weights."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from polysketch.extras import require
from polysketch.integrations.graphs.model import SpanModel
from polysketch.integrations.graphs.operator import OPSET, OnnxRecurrence
from polysketch.integrations.graphs.tracing import trace
from polysketch.models import TransformerLM

WEIGHTS = "weights.data"

_CONVERTED_TO = 25  # the last opset that onnxscript converts graphs to
_WORTH_SHARING = 1024  # bytes
_ALIGNMENT = 64  # bytes


def write_onnx(model: TransformerLM, folder: Path) -> tuple[SpanModel, dict[str, str]]:
    """As `write_model`, for ONNX: prefill.onnx, step.onnx and weights.data.

    Sums over features, where nothing is exact beside them, are nodes of ONNX's operator LinearAttention.
    """
    spans, programs = trace(model, OnnxRecurrence())
    with _quiet():
        graphs = {name: _converted(program, spans) for name, program in programs.items()}
    files = {name: f"{name}.onnx" for name in graphs}
    _move_weights(graphs.values(), folder)
    for name, graph in graphs.items():
        require("onnx_ir").save(graph, folder / files[name])
        require("onnx").checker.check_model(folder / files[name])
    return spans, files


def _converted(program: torch.export.ExportedProgram, spans: SpanModel) -> Any:
    """A graph as a model of onnx_ir, with the names of the manifest."""
    found = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        opset_version=_CONVERTED_TO,
        input_names=["ids", *(f"past.{name}" for name in spans.names)],
        output_names=["logits", *(f"present.{name}" for name in spans.names)],
    )
    assert found is not None
    _require_unchanged(node.op_type for node in found.model.graph)
    found.model.opset_imports[""] = OPSET
    return found.model


def _require_unchanged(operators: Iterable[str]) -> None:
    """Of the operators in use, those that were there before mean the same in the newer opset.

    Range, new in it, takes more dtypes and a precision for the narrow ones.
    """
    schema = require("onnx").defs.get_schema
    changed = {name for name in operators if schema(name, OPSET).since_version > _CONVERTED_TO}
    assert changed <= {"LinearAttention", "Range"}, changed


def _move_weights(graphs: Iterable[Any], folder: Path) -> None:
    """Weights go into one file, each once, and the graphs name their places there."""
    places: dict[bytes, int] = {}
    with open(folder / WEIGHTS, "wb") as file:
        for graph in graphs:
            for value in graph.graph.initializers.values():
                if value.const_value.nbytes >= _WORTH_SHARING:
                    value.const_value = _moved(value.const_value, file, places, folder)


def _moved(tensor: Any, file: BinaryIO, places: dict[bytes, int], folder: Path) -> Any:
    """A tensor of onnx_ir whose bytes are in the file."""
    content = tensor.tobytes()
    digest = hashlib.sha256(content).digest()
    if digest not in places:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        places[digest] = file.tell()
        file.write(content)
    return require("onnx_ir").ExternalTensor(
        WEIGHTS, places[digest], len(content), tensor.dtype, shape=tensor.shape, name=tensor.name, base_dir=folder
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporter says of itself and of packages that are not here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
