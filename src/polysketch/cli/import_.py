"""`polysketch import DIR RUN`: a model that transformers saved as a run folder, for the other commands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["ImportFlags", "run"]


@dataclass(frozen=True)
class ImportFlags:
    """Make a run folder of an exported model, for instance after fine-tuning it with transformers.

    `polysketch evaluate`, `generate` and `train --init-from` take the run. It cannot be resumed: there is no optimizer
    state.

    Examples:
      polysketch import exported runs/tuned
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """folder of the model: config.json and safetensors"""
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run folder to write: new or empty"""
    tokenizer: Path | None = None
    """the model's tokenizer, where DIR has not got it: a tokenizer file or a folder of prepared data"""
    data: Path | None = None
    """folder of prepared text to evaluate on by default"""


def run(flags: ImportFlags) -> int:
    """Import as the flags say, and return the exit status."""
    from polysketch.integrations.transformers_folder import check_import

    check_import(flags.folder, flags.run, data=flags.data)  # before transformers is loaded
    from polysketch.integrations.huggingface import import_model, quiet

    with quiet():
        import_model(flags.folder, flags.run, tokenizer=flags.tokenizer, data=flags.data)
    print(f"imported to {flags.run}")
    return 0
