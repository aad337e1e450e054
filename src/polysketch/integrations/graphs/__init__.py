"""A trained model as two graphs, prefill and step, whose state goes in and comes out: of ONNX, or of `torch.export`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from polysketch.extras import how_to_install
from polysketch.storage import require_free
from polysketch.training.run_folder import find_run, require_text

__all__ = ["FORMATS", "export_graphs"]

FORMATS = ("onnx", "torch-export")
"""Kinds of graphs: of ONNX, and of `torch.export`."""

_NEEDED = {"onnx": ("onnxscript", "onnx", "transformers"), "torch-export": ("transformers",)}


def export_graphs(
    run: str | Path, folder: str | Path, *, format: Literal["onnx", "torch-export"] = "onnx", checkpoint: str = "latest"
) -> Path:
    """Write the language model of a run as graphs of constant state.

    The folder has the graphs `prefill` (of 1 to 4,096 new tokens) and `step` (of one), each (ids, state) -> (logits of
    the next token, state), for one row in float32; manifest.json, which names all inputs and outputs; config.json, the
    model's; and tokenizer.json. It appears whole or not at all.

    Args:
        run: the run folder.
        folder: to write; new or empty.
        format: "onnx", two graphs that share a file of weights; or "torch-export", two programs for
            `torch.export.load`.
        checkpoint: a checkpoint's name, `latest`, or `best` (of the least validation loss).

    Returns:
        The folder.

    Raises:
        FileNotFoundError: no run, or no such checkpoint.
        FileExistsError: the folder has contents.
        ImportError: a package of the extra `onnx` is missing; the message has the pip command.
        ValueError: a run that did not learn text, or a layer whose state grows, by its number and name.
    """
    _check(run, folder, format, checkpoint)
    from polysketch.integrations.graphs.folder import write_graphs

    return write_graphs(Path(run), Path(folder), format, checkpoint)


def _check(run: str | Path, folder: str | Path, format: str, checkpoint: str) -> None:
    """Refuse an export without a run to export, a free folder or the packages, before PyTorch is loaded."""
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known formats: {', '.join(FORMATS)}")
    require_free(Path(folder))
    require_text(run, find_run(run, checkpoint)[0])
    for package in _NEEDED[format]:
        if find_spec(package) is None:
            raise ImportError(how_to_install(package))
