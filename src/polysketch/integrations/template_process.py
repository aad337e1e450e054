"""A process that renders a chat template of Jinja, which may come from a stranger; run as a script by `template.py`.

It imports the standard library and Jinja alone, so that it starts at once and its memory is the template's. Jinja's
sandbox keeps a template from Python's innards, not from loops and texts without end: the system's limits do, and end
this process. Each line of the input is JSON, and so is each line of the output.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__: list[str] = []


class _Said(Extension):
    """`{% generation %}`, by which transformers marks what a model is to learn: here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Said, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _limit_memory(most: int) -> None:
    """Let an allocation beyond so many bytes fail, on systems that know such a limit."""
    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _limit_time(seconds: float) -> None:
    """Let the system end this process once it has computed so long; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(rendered: Callable[[], str], letters: int) -> dict[str, str]:
    """The text, or what is wrong with the template."""
    try:
        text = rendered()
    except MemoryError:
        return {"excess": "memory"}
    except RecursionError:
        return {"error": "it calls itself without end, or nests too deep"}
    except Exception as error:  # noqa: BLE001 - whatever a stranger's program raises
        return {"error": str(error) or type(error).__name__}
    return {"text": text} if len(text) <= letters else {"excess": "letters"}


def _serve() -> None:
    """Answer until there is no more input. The first line has the template and the limits, the others messages."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the process that asks
    given = json.loads(sys.stdin.readline())
    _limit_memory(given["memory"])
    made: list[Any] = []

    def rendered(messages: Any) -> str:
        """The text of messages; the template is read with the first of them."""
        if not made:
            made.append(_environment().from_string(given["template"]))
        text: str = made[0].render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **given["variables"]
        )
        return text

    for line in sys.stdin:
        messages = json.loads(line)
        _limit_time(given["seconds"])
        found = json.dumps(_answer(lambda messages=messages: rendered(messages), given["letters"]))  # type: ignore[misc]
        _limit_time(0)
        print(found, flush=True)


if __name__ == "__main__":
    _serve()
