"""Imports of optional packages, at the place of use, with the pip command that brings a missing one."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: Name of the package to import, for instance ``"tokenizers"``.
        extra: The extra of polysketch that brings it, for instance ``"train"``.

    Returns:
        The imported module.

    Raises:
        ImportError: The package is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"the package {module} is needed here: pip install 'polysketch[{extra}]'") from error
