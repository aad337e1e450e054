"""Where a command writes to when it is not told: a name that the source suggests."""

from collections.abc import Sequence
from pathlib import Path

from polysketch.cli.standard_input import STANDARD_INPUT

__all__ = ["prepared_folder", "run_folder"]


def prepared_folder(sources: Sequence[str]) -> Path:
    """`data/NAME`, where NAME is that of the only source without its endings.

    Raises:
        ValueError: no source, several, or standard input.
    """
    if not sources:
        raise ValueError("expected a SOURCE: a file, a folder, a dataset, or - for standard input")
    if len(sources) != 1 or sources[0] == STANDARD_INPUT:
        raise ValueError("expected --out, the folder to make: only one file, folder or dataset gives it a name")
    source = sources[0]
    if not Path(source).exists():  # a dataset, perhaps with a configuration: hf:NAME:CONFIG
        return Path("data") / source.removeprefix("hf:").replace("/", "-").replace(":", "-")
    name = Path(source).resolve().name
    return Path("data") / (name if Path(source).is_dir() else name.split(".")[0] or name)


def run_folder(data: Path) -> Path:
    """`runs/NAME`, where NAME is that of the folder with the data."""
    return Path("runs") / data.resolve().name
