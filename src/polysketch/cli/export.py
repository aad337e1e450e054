"""`polysketch export RUN DIR`: a trained model as a folder that transformers loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["ExportFlags", "run"]


@dataclass(frozen=True)
class ExportFlags:
    """Write the model of a run for transformers: safetensors, configuration, tokenizer, and a card with its figures.

    The card says what loads the folder after `import polysketch.integrations.huggingface`: AutoModelForCausalLM a
    language model; AutoModelForSequenceClassification, AutoModelForMaskedLM or AutoModelForSeq2SeqLM the model of a
    task, by what the task asks. A tokenizer is there where the run has one.

    Examples:
      polysketch export runs/books exported
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """folder of the training run"""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """folder to write: new or empty"""
    checkpoint: str = "latest"
    """which checkpoint of the run: latest, or a name such as step-00000100"""


def run(flags: ExportFlags) -> int:
    """Export as the flags say, and return the exit status."""
    from polysketch.integrations.transformers_folder import check_export

    check_export(flags.run, flags.folder, checkpoint=flags.checkpoint)  # before transformers is loaded
    from polysketch.integrations.huggingface import export_run, quiet

    with quiet():
        export_run(flags.run, flags.folder, checkpoint=flags.checkpoint)
    print(f"exported to {flags.folder}: README.md there has its figures, and lines that use it")
    return 0
