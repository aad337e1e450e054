"""The folder of an export: graphs, and beside them what a program needs to use them without this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polysketch import __version__
from polysketch.integrations.graphs.model import SpanModel
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer
from polysketch.models import TransformerLM
from polysketch.storage import whole_folder
from polysketch.storage.strict_json import encoded
from polysketch.training import load_model

SPAN = 256
"""Tokens of a prompt that the manifest advises to give at a time: the work within a span grows with its square."""


def write_graphs(run: Path, folder: Path, format: str, checkpoint: str) -> Path:
    """As `export_graphs`, of what was checked."""
    model, description = load_model(run, device="cpu", checkpoint=checkpoint)
    tokenizer = to_fast_tokenizer(description.tokenizer).backend_tokenizer
    facts = {
        "run": run.resolve().name,
        "step_of_training": description.step,
        "context_length": description.context_length,
        "end_of_text": description.tokenizer.end_of_text,
    }
    with whole_folder(folder, sums=True) as staging:
        spans, files = write_model(model, staging, format)
        tokenizer.save(str(staging / "tokenizer.json"))
        (staging / "config.json").write_bytes(encoded(model.config.to_dict(), indent=2))
        (staging / "manifest.json").write_bytes(encoded(manifest(spans, format, files) | facts, indent=2))
    return folder


def write_model(model: TransformerLM, folder: Path, format: str) -> tuple[SpanModel, dict[str, str]]:
    """Write the graphs alone.

    Args:
        model: a language model.
        folder: an existing folder.
        format: one of `FORMATS`.

    Returns:
        The model that was traced, and the files of the graphs by their names.

    Raises:
        ValueError: a layer whose state grows, by its number and name.
    """
    if format == "onnx":
        from polysketch.integrations.graphs.onnx_files import write_onnx

        return write_onnx(model, folder)
    from polysketch.integrations.graphs.tracing import trace

    spans, programs = trace(model)
    for name, program in programs.items():
        torch.export.save(program, folder / f"{name}.pt2")
    return spans, {name: f"{name}.pt2" for name in programs}


def manifest(spans: SpanModel, format: str, files: dict[str, str]) -> dict[str, Any]:
    """What a program has to know of the graphs: JSON values.

    `state` is in the order of the graphs' inputs behind `ids`, and of their outputs behind `logits`; before the first
    token all of it is zeros.
    """
    parts = [(part.name, part.first) for part in spans.parts]
    return {
        "format": format,
        "polysketch": __version__,
        "graphs": files,
        "vocab_size": spans.model.config.vocab_size,
        "span": SPAN,
        "state": [
            {
                "input": f"past.{name}",
                "output": f"present.{name}",
                "shape": list(first.shape),
                "dtype": str(first.dtype).removeprefix("torch."),
            }
            for name, first in parts
        ],
        "state_bytes": sum(first.nbytes for _, first in parts),
    }
