"""Chat templates: the text that transformers makes, and an end within bounds for those that were made to have none."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from polysketch.integrations import template as templates
from polysketch.integrations.template import Template

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

CHAT = [{"role": "user", "content": "Who  barks?\n<b>'é'</b>\ud83d"}, {"role": "assistant", "content": "A dog."}] * 2
TEMPLATES = {
    "turns": "{% for each in messages %}<|{{ each.role }}|>{{ each['content'] | trim }}\n{% endfor %}",
    "blocks are trimmed": "  {% if messages %}\n  {{ bos_token }}\n  {%- endif %}\n\n{{ eos_token }}\n",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=1) }}",
    "loop controls": "{% for each in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "what is learnt": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ messages[0].role }}{% endgeneration %}{{ a }}",
    "prompt": "{% if add_generation_prompt and not tools and documents is none %}assistant:{% endif %}",
    "namespaces and macros": "{% set n = namespace(a=0) %}{% macro f(x) %}[{{ x }}]{% endmacro %}"
    "{% for each in messages %}{% set n.a = n.a + 1 %}{{ f(n.a) }}{% endfor %}",
    "dates": "{{ strftime_now('%Y') | int > 2000 }}{{ strftime_now is defined }}{{ absent is defined }}{{ absent }}",
}


@pytest.fixture(scope="module")
def tokenizer():
    """Of transformers, of letters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_the_text_is_that_of_transformers(source, tokenizer):
    expected = tokenizer.apply_chat_template(CHAT, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert Template(source, tokenizer.special_tokens_map).render(CHAT) == expected


REFUSED = {
    "{{ raise_exception('users\n only') }}": "refuses these messages: users only$",
    "{% for each in %}": "refuses these messages: Expected an expression",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{{ messages.append(1) }}": "attribute 'append' of 'list' object is unsafe",
    "{{ self.__init__.__globals__ }}": "unsafe|undefined",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "unsafe|undefined",
    "{{ 1 // 0 }}": "division or modulo by zero|by zero",
    "{{ messages[99].content.text }}": "has no element 99",
    "{% for each in range(10**9) %}{% endfor %}": "Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ '%' ~ 10**9 ~ 'd' }}{{ ('%' ~ 10**10 ~ 'd') % 1 }}": "memory",
    "{{ 'a' * 10**10 }}": "takes more than 1024 MiB of memory",
    "{{ 'a' * 10**8 }}": "makes more than 64,000,000 letters",
    "{% include 'other' %}": "no loader for this environment",
    "(" * 10 + "{{ " + "(" * 50_000 + " }}": "nests too deep|ended with status",
}


@pytest.mark.parametrize("source", REFUSED, ids=lambda source: source[:40])
def test_what_does_harm_is_refused_in_one_line(source):
    with pytest.raises(ValueError, match=REFUSED[source]) as refused:
        Template(source, {}).render(CHAT[:1])
    assert "\n" not in str(refused.value)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one operation": "{{ 10 ** (messages | length * 10**9) % 7 }}",
    "before it runs": "{% set a = 9 ** (9**9) %}",
}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no limit of time")
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_ended_and_the_next_chat_begins_anew(source, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    hostile = Template("{% if messages | length == 1 %}" + source + "{% else %}well{% endif %}", {})
    works = source != ENDLESS["before it runs"]  # Jinja works this out while it reads the template
    assert not works or hostile.render(CHAT) == "well"
    with pytest.raises(ValueError, match="computes for more than"):
        hostile.render(CHAT[:1])
    assert not works or hostile.render(CHAT) == "well"


def test_threads_get_each_their_own_text():
    shared, found = Template("{{ messages[0].content }}", {}), {}

    def ask(number):
        found[number] = [shared.render([{"content": f"{number} {turn}"}]) for turn in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {turn}" for turn in range(20)] for number in range(4)}


def test_after_an_interrupt_the_next_answer_is_that_of_the_next_question():
    shared = Template(
        "{% if messages[0] == 1 %}{% for a in range(4000) %}{{ range(900) | sum }}{% endfor %}{% endif %}"
        "{{ messages[0] }}",
        {},
    )
    assert shared.render([2]) == "2"
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            shared.render([1])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert shared.render([3]) == "3"


def test_the_process_ends_with_the_template_and_with_the_program():
    one = Template("{{ messages[0] }}", {})
    one.render([1])
    process = one._process
    del one
    gc.collect()
    assert process.poll() is not None
    program = "from polysketch.integrations.template import Template\n"
    program += "one = Template('a', {})\none.render([])\nprint(one._process.pid)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
    assert not told.stderr
    until = time.monotonic() + 10
    while time.monotonic() < until and _is_there(int(told.stdout)):
        time.sleep(0.05)
    assert not _is_there(int(told.stdout))


def _is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
