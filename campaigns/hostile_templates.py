"""Chat templates that loop, grow, recurse or reach for Python, in every place where transformers looks for one."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaigns.isolated import complaint, isolated
from campaigns.readers import make_sources
from polysketch.cli import main

SECONDS = 120
_OF_A_TEMPLATE = 2.0  # of computing: ten of each of hundreds are too many
_SECRET = "0f-nobody-else-s-template"

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% set a = 9 ** (9 ** 9) %}",
    "{{ 10 ** (messages | length * 10 ** 9) % 7 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set n = namespace(a=[]) %}{% for a in range(99999) %}{% set n.a = n.a + [a] * 999 %}{% endfor %}",
    "{% for a in lipsum(n=99999) %}{% endfor %}",
    "{% for a in [0] recursive %}{{ loop([0]) }}{% endfor %}",
)
LARGE = (
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 10**8 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'a' | center(10**10) }}",
    "{% set n = namespace(a='aaaaaaaa') %}{% for a in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "{{ [[0] * 10**5] * 10**5 | list }}",
    "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{{ messages * 10**9 }}",
    "{{ range(99999) | batch(10**9, 'x') | list }}",
    "{{ 'a' | indent(10**10, true) }}",
)
REACHING = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ self.__init__.__globals__.__builtins__.open('SECRET').read() }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ strftime_now.__globals__ }}{{ raise_exception.__code__ }}",
    "{{ messages | map(attribute='__class__') | list }}{{ '' | attr('__class__') }}",
    "{% include 'SECRET' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% extends 'SECRET' %}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(messages) }}{{ messages.clear() }}",
    "{{ raise_exception(messages) }}{{ raise_exception(1, 2) }}",
    "{{ strftime_now('%' * 10**7) }}{{ strftime_now(1) }}",
)
BROKEN = ("{% for a in %}", "{{ " * 999, "{% if 1 %}" * 3000, "(" * 9, "{{ 1 // 0 }}", "{{ messages[9].a.b }}", "\x00")
BROKEN += (
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{{ " + "[" * 99 + "]" * 99 + " }}",
    "{{ a.b.c }}",
    "\x1b[2J",
)
_AROUND = (
    "{}",
    "{{% if messages %}}{}{{% endif %}}",
    "{{% generation %}}{}{{% endgeneration %}}",
    "{{% set x %}}{}{{% endset %}}{{{{ x }}}}",
)
_NO_TEXT: tuple[Any, ...] = (5, {}, [], [5], [{}], {"default": 5}, True, [{"name": 5, "template": "x"}], {"other": "x"})


def attacks(folder: Path, draw: random.Random) -> Iterator[tuple[str, str, str | None]]:
    """A model with such a template, asked in a chat: what was done, what came of it, and what is wrong."""
    folder.mkdir(parents=True)
    sources = make_sources(folder / "sources")
    canary, secret = folder / "canary", folder / "secret"
    secret.write_text(_SECRET)
    while True:
        shutil.rmtree(folder / "model", ignore_errors=True)
        shutil.copytree(sources / "exported", folder / "model")
        (folder / "model" / "SHA256SUMS").unlink(missing_ok=True)  # as a hostile author would
        done = _plant(folder / "model", draw, {"CANARY": str(canary), "SECRET": str(secret)})
        ended = isolated(_asking(folder / "model"), seconds=SECONDS)
        wrong = complaint(ended)
        if wrong is not None and "says no more" in wrong and "the chat template refuses these messages" in ended.text:
            wrong = None  # the words after it are the template's own
        if canary.exists():
            canary.unlink()
            wrong = "code from a template ran"
        if _SECRET in ended.text + ended.output:
            wrong = "a file outside was read and shown"
        yield done, "refused" if ended.status else "answered", wrong


def _plant(model: Path, draw: random.Random, names: dict[str, str]) -> str:
    """Give the model a template, and say which and where."""
    source: Any = draw.choice(_AROUND).format(draw.choice(draw.choice((ENDLESS, LARGE, REACHING, BROKEN))))
    for name, path in names.items():
        source = source.replace(name, path)
    place, value = draw.choice(("jinja", "text", "list", "other")), source
    config = model / "tokenizer_config.json"
    if place == "jinja":
        (model / "chat_template.jinja").write_text(source)
    else:
        if place == "list":
            value = [{"name": "default", "template": source}, {"name": "tool_use", "template": "x"}]
        elif place == "other":
            value = draw.choice(_NO_TEXT)
        config.write_text(json.dumps({**json.loads(config.read_bytes()), "chat_template": value}))
    return f"{place}: {str(value)[:150]}"


def _asking(model: Path) -> Callable[[], int]:
    """The call of the command."""

    def work() -> int:
        from polysketch.integrations import template

        template.SECONDS = _OF_A_TEMPLATE
        return main(["generate", str(model), "--chat", "--prompt", "hello", "--max-new-tokens", "1"])

    return work
