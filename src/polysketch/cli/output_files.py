"""What every command that writes a plot asks first."""

from pathlib import Path

_SUFFIXES = (".png", ".pdf", ".svg")


def check_plot(file: Path | None) -> None:
    """Refuse a plot that could not be written before anything long is computed for it.

    Raises:
        ValueError: another suffix than .png, .pdf or .svg.
        FileNotFoundError: no such folder.
        ImportError: no matplotlib.
    """
    if file is None:
        return
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"expected --plot to end in {', '.join(_SUFFIXES)}, found {file.name!r}")
    check_folder(file, "--plot")
    import matplotlib  # noqa: F401  (the command line names the extra that brings it)


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
