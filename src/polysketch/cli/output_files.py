"""What every command that writes a plot asks first."""

from pathlib import Path

from polysketch.extras import how_to_install
from polysketch.plotting import SUFFIXES, is_installed


def check_plot(file: Path | None) -> None:
    """Refuse a plot that could not be written before anything long is computed for it.

    Raises:
        ValueError: another suffix than .png, .pdf or .svg.
        FileNotFoundError: no such folder.
        ImportError: no matplotlib.
    """
    if file is None:
        return
    if file.suffix not in SUFFIXES:
        raise ValueError(f"expected --plot to end in {', '.join(SUFFIXES)}, found {file.name!r}")
    check_folder(file, "--plot")
    if not is_installed():
        raise ImportError(how_to_install("matplotlib"))


def check_folder(file: Path | None, flag: str) -> None:
    """Refuse a file in a folder that does not exist, or that is a folder itself.

    Raises:
        FileNotFoundError: no such folder.
        IsADirectoryError: the file is a folder.
    """
    if file is None:
        return
    if not file.parent.is_dir():
        raise FileNotFoundError(f"expected a folder {file.parent} for {flag}, found none: make it first")
    if file.is_dir():
        raise IsADirectoryError(f"expected a file for {flag}, found the folder {file}")
