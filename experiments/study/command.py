"""What the experiments' command lines share: parsing, one line for a failure, and where results go."""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
"""Where records, tables and plots of real sizes are kept."""

_KNOWN_FAILURES = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def run_command(
    name: str,
    run: Callable[[Any], int],
    arguments: Sequence[str] | None = None,
    *,
    sizes: Mapping[str, str] | None = None,
) -> int:
    """Parse the flags that `run` takes (the dataclass it is annotated with) and run it.

    Args:
        name: of the module, for help.
        run: flags -> exit status.
        arguments: default: the process's own.
        sizes: value of --size -> the flags that it stands for; flags that are given count more.

    Returns:
        Its exit status; 1 after a failure, explained in one line on stderr; 130 after Ctrl-C.
    """
    import tyro

    flags_class = next(iter(typing.get_type_hints(run).values()))
    given = _with_size(list(sys.argv[1:] if arguments is None else arguments), sizes or {})
    flags = tyro.cli(flags_class, prog=f"python -m {name}", args=given, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        return run(flags)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    except _KNOWN_FAILURES as error:
        print(f"{name.rpartition('.')[2]}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _with_size(arguments: list[str], sizes: Mapping[str, str]) -> list[str]:
    """The flags of the size, and behind them those that were given: the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--size", nargs="?")
    size = parser.parse_known_args(arguments)[0].size
    return [*sizes.get(size, "").split(), *arguments]


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
