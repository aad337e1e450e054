"""The `polysketch` command: one file per verb, loaded when that verb is asked for and not before.

A verb's file exports `run(flags) -> int`, where `flags` is annotated with the verb's own dataclass: its fields are the
command's flags, its docstrings their help. It may export `defaults(arguments)` as well: flags that are not on the
command line are then as this instance of the dataclass has them. To add a verb, write that file and add a line to
`VERBS`.

Exit status: 0 done, 1 a failure that is explained in one line on stderr, 2 wrong usage, 130 interrupted.
"""

import argparse
import contextlib
import errno
import importlib
import io
import keyword
import os
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from polysketch import __version__
from polysketch.cli import exit_status
from polysketch.cli.bounds import check_numbers
from polysketch.cli.help import asks_for_help, help_of
from polysketch.cli.memory_message import memory_message
from polysketch.cli.terminal import visible, visible_streams
from polysketch.cli.usage_error import usage_line
from polysketch.distributed.watch import ToldByAnother
from polysketch.extras import EXTRA_OF, how_to_install

__all__ = ["main"]

VERBS = {
    "prepare": "turn text (files, folders, data sets) into tokens, split for training and testing",
    "task": "make a task from a seed, or from classified texts and images, to train models on",
    "train": "train a model on prepared text or a task, or go on with a run that was stopped",
    "compare": "training runs side by side: a table, and a plot of their losses",
    "evaluate": "loss of a model on held-out text, its score on tasks, and how far back it reaches",
    "generate": "continue a prompt with a trained model",
    "serve": "answer many people at once: OpenAI's interface over HTTP, and a page to chat on",
    "export": "write a trained model for transformers, with a model card",
    "import": "make a run of a model that transformers saved, for instance after fine-tuning",
    "convert": "give a softmax model of transformers another attention, and train back what that cost",
    "verify": "whether every byte of a folder is what was written",
    "benchmark": "time attention, training and decoding on this machine",
    "study": "the papers' experiments: what they say, and what comes out here",
}
"""Every verb and what it does; verb `x` lives in polysketch/cli/x.py; `import`, a word of Python's, in import_.py."""

FIRST_STEPS = """first steps:
  polysketch prepare my_texts/ --tokenizer bytes --out data
  polysketch train --data data --preset tiny --out runs/first
  polysketch evaluate runs/first
  polysketch generate runs/first --prompt "Once upon a time"

`polysketch COMMAND --help` lists the flags of a command.
"""

KNOWN_FAILURES = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)
"""What bad input, a missing package or a full machine raises. Anything else is a mistake of ours: a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    _replace_closed_streams()
    try:
        arguments = _parser().parse_args(argv)
        if arguments.verb is None:
            _parser().print_help(sys.stderr)
            return 2
        return _run_reporting(arguments.verb, arguments.flags, traceback=arguments.traceback)
    except SystemExit as stop:  # how argparse and tyro end after --help (0) and wrong usage (2)
        return stop.code if isinstance(stop.code, int) else 2


def function_of(verb: str) -> Callable[[Any], int]:
    """The `run` of a verb, its file being loaded; the annotation of its argument is the dataclass of the flags."""
    return importlib.import_module(_module_of(verb)).run


def flags_of(verb: str) -> type[Any]:
    """The dataclass of a verb's flags."""
    return next(iter(typing.get_type_hints(function_of(verb)).values()))


def _replace_closed_streams() -> None:
    """Give the standard streams that the caller closed (`>&-`) an end, before a file of ours gets their number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115  (open until the process ends)


def _run_reporting(verb: str, arguments: list[str], *, traceback: bool) -> int:
    """Run a verb; turn a known failure into one line and an exit status, unless the whole traceback is wanted."""
    try:
        return _run_verb(verb, arguments)
    except KeyboardInterrupt as stop:  # Ctrl-C, or a signal that work of several runs was asked to stop by
        return _fail("interrupted", status=exit_status.of_signal(getattr(stop, "signal_number", None)))
    except BrokenPipeError:
        return _leave_broken_pipe()
    except ToldByAnother:
        return 1
    except Exception as error:
        if traceback or not _is_known(error):
            raise
        return _fail(_describe(error), status=1)


def _is_known(error: Exception) -> bool:
    """Whether bad input or a full machine explains it.

    Of libraries that may not be loaded, safetensors has a type of error of its own, and tokenizers raises a bare
    `Exception` where its file cannot be written.
    """
    return isinstance(error, KNOWN_FAILURES) or type(error).__name__ == "SafetensorError" or type(error) is Exception


def _parser() -> argparse.ArgumentParser:
    """Return the parser of everything up to the verb; what follows it is the verb's own business."""
    listing = "\n".join(f"  {verb:<10} {summary}" for verb, summary in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="polysketch",
        usage="polysketch [--help] [--version] [--traceback] COMMAND ...",
        description="Language models with attention in less than quadratic time.\n\ncommands:\n" + listing,
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"polysketch {__version__}")
    parser.add_argument("--traceback", action="store_true", help="on failure show where, not only what")
    parser.add_argument("verb", nargs="?", choices=list(VERBS), metavar="COMMAND", help="one of the commands above")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _module_of(verb: str) -> str:
    """Return the module of a verb; a verb that is a word of Python's has an underscore after it."""
    return f"{__name__}.{verb}_" if keyword.iskeyword(verb) else f"{__name__}.{verb}"


def _run_verb(verb: str, arguments: list[str]) -> int:
    """Load the verb's file, parse its flags and run it."""
    run, flags_class = function_of(verb), flags_of(verb)
    if asks_for_help(arguments):
        print(help_of(f"polysketch {verb}", flags_class, arguments))
        return 0
    flags = _parsed(f"polysketch {verb}", flags_class, arguments, _defaults(verb, arguments))
    check_numbers(flags)
    with visible_streams():
        return run(flags)


def _parsed(command: str, flags_class: type[Any], arguments: list[str], defaults: dict[str, Any]) -> Any:
    """The flags of a command line; what is wrong with it is said in one line.

    Raises:
        SystemExit: with status 2, on wrong usage.
    """
    import tyro

    box, letters = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:  # the box is drawn in the letters that standard output has
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(letters):
            flags = tyro.cli(flags_class, prog=command, args=arguments, **defaults)
    except SystemExit as stop:
        if stop.code and _tells():
            print(visible(usage_line(box.getvalue(), command)), file=sys.stderr)
        raise
    sys.stderr.write(box.getvalue())  # a warning of a library
    return flags


def _defaults(verb: str, arguments: list[str]) -> dict[str, Any]:
    """What `tyro.cli` is told of flags that need not be given: those of a run that a verb goes on with."""
    found = getattr(importlib.import_module(_module_of(verb)), "defaults", lambda _: None)(arguments)
    return {} if found is None else {"default": found}


def _describe(error: BaseException) -> str:
    """Return one line that says what went wrong and, where that is known, what to do about it.

    What a stranger's file put into it cannot steer the terminal: control characters are shown escaped.
    """
    return visible(_one_line(error))


def _one_line(error: BaseException) -> str:
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in EXTRA_OF:
        return how_to_install(error.name or "")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk{_where(error)}: free some and run the same command again"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}{_where(error)}"
    if isinstance(error, UnicodeEncodeError):
        found = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
        return f"expected text in UTF-8, found {found!r}: is a name or a text of the command line in another encoding?"
    return memory_message(error) or " ".join(str(error).split()) or type(error).__name__


def _where(error: OSError) -> str:
    """Return ": FILE" where the error names one."""
    return f": {error.filename}" if error.filename is not None else ""


def _fail(message: str, status: int) -> int:
    """Print the message as one line on stderr and return the exit status; of several processes, one prints."""
    if _tells():
        print(f"polysketch: {message}", file=sys.stderr)
    return status


def _tells() -> bool:
    """Whether this process is the one of its machine, of those that torchrun started, that prints what all would."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _leave_broken_pipe() -> int:
    """Whoever read our output has gone (`| head`): end without a word, and without another error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
