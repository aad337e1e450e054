"""What a mechanism says of itself: the options in its representation; formula, cost and source in its docstring."""

import inspect
import re
from dataclasses import replace

import pytest

from attention.cases import Case
from polysketch import attention

FORMULA = re.compile(r"o_i = |softmax\(|kap\(")
SOURCE = re.compile(r"section|equation|chapter|arXiv|ICLR|ICML")


@pytest.mark.parametrize("name", attention.MECHANISMS)
def test_the_docstring_states_formula_cost_and_source(name: str):
    text = inspect.getdoc(attention.mechanism_class(name))
    assert FORMULA.search(text)
    assert re.search(r"^Cost[,:].*(operations|multiply-adds)", text, re.M | re.S)
    assert SOURCE.search(text)


@pytest.mark.parametrize("name", attention.MECHANISMS)
def test_the_docstring_describes_every_option(name: str):
    text = inspect.getdoc(attention.mechanism_class(name))
    described = re.findall(r"^    ([\w, ]+): ", text, re.M)
    assert set(attention.option_names(name)) <= {option for names in described for option in names.split(", ")}


def test_the_representation_tells_every_option(case: Case):
    text = repr(case.build())
    assert [option for option in case.options if option != "hidden_size" and not tells(case, option, text)] == []


def tells(case: Case, option: str, text: str) -> bool:
    """Whether the option stands in the text by its name and value, or it would be another text without the option."""
    others = {name: value for name, value in case.options.items() if name != option}
    return f"{option}={case.options[option]!r}" in text or repr(replace(case, options=others).build()) != text
