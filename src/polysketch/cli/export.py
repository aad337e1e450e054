"""`polysketch export RUN DIR`: a trained model as a folder for transformers, or as graphs of ONNX or `torch.export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from polysketch.cli.next_command import open_in_transformers

__all__ = ["ExportFlags", "run"]


@dataclass(frozen=True)
class ExportFlags:
    """Write the model of a run for transformers, or as graphs that other programs run.

    For transformers: safetensors, configuration, tokenizer, and a card with its figures.

    The card says what loads the folder after `import polysketch.integrations.huggingface`: AutoModelForCausalLM a
    language model; AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForMaskedLM or
    AutoModelForSeq2SeqLM the model of a task, by what the task asks. A tokenizer is there where the run has one.

    Graphs are for language models whose state has a constant size: prefill and step, with the state as inputs and
    outputs, and beside them manifest.json, config.json and tokenizer.json.

    Examples:
      polysketch export runs/books exported
      polysketch export runs/books edge --format onnx
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """folder of the training run"""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """folder to write: new or empty"""
    checkpoint: str = "latest"
    """which checkpoint of the run: latest, best (the least validation loss), or a name such as
    step-00000100"""
    format: Literal["transformers", "onnx", "torch-export"] = "transformers"
    """what to write: a model of transformers, or graphs: onnx (runs without PyTorch), or torch-export"""


def run(flags: ExportFlags) -> int:
    """Export as the flags say, and return the exit status."""
    if flags.format != "transformers":
        return _write_graphs(flags)
    from polysketch.integrations.transformers_folder import check_export

    check_export(flags.run, flags.folder, checkpoint=flags.checkpoint)  # before transformers is loaded
    from polysketch.integrations.huggingface import export_run, quiet

    with quiet():
        export_run(flags.run, flags.folder, checkpoint=flags.checkpoint)
    print(f"exported to {flags.folder}: README.md there has its figures, and lines that use it")
    if (line := open_in_transformers(flags.folder)) is not None:
        print(line)
    return 0


def _write_graphs(flags: ExportFlags) -> int:
    from polysketch.integrations.graphs import export_graphs

    assert flags.format != "transformers"
    export_graphs(flags.run, flags.folder, format=flags.format, checkpoint=flags.checkpoint)
    print(f"exported to {flags.folder}: prefill and step; manifest.json names their inputs, outputs and state")
    return 0
