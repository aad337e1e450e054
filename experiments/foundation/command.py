"""What the experiments' command lines share: parsing, one line for a failure, and where results go."""

import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.foundation.variants import experiment_mechanisms

RESULTS = Path(__file__).resolve().parents[1] / "results"
"""Where records, tables and plots of real sizes are kept."""

_KNOWN_FAILURES = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def run_command(name: str, run: Callable[[Any], int], arguments: Sequence[str] | None = None) -> int:
    """Parse the flags that `run` takes (the dataclass it is annotated with) and run it.

    Returns:
        Its exit status; 1 after a failure, explained in one line on stderr; 130 after Ctrl-C.
    """
    import tyro

    flags_class = next(iter(typing.get_type_hints(run).values()))
    flags = tyro.cli(flags_class, prog=f"python -m {name}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        with experiment_mechanisms():
            return run(flags)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    except _KNOWN_FAILURES as error:
        print(f"{name.rpartition('.')[2]}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def with_overrides(defaults: Any, flags: Any) -> Any:
    """The dataclass `defaults` with the fields of `flags` that have the same name and are not None."""
    given = {field.name: getattr(flags, field.name, None) for field in dataclasses.fields(defaults)}
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})


def of_size(sizes: Mapping[str, Any], size: str) -> Any:
    """The settings called `size`.

    Raises:
        ValueError: no such size; the message lists them.
    """
    if size not in sizes:
        raise ValueError(f"--size: expected one of {', '.join(sizes)}, found {size!r}")
    return sizes[size]


def results_folder(chosen: Path | None, experiment: str, size: str, out: Path) -> Path:
    """Where to put results: as chosen, else among the project's; those of a smoke run stay in `out`."""
    if chosen is not None:
        return chosen
    return out / "results" if size == "smoke" else RESULTS / f"{experiment}-{size}"
