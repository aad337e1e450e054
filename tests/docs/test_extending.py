"""The page on extending does what it says: its code runs, and the mechanism it makes keeps the contract."""

import re
from pathlib import Path

import pytest

from attention import test_contract as contract
from attention.cases import Case
from polysketch import attention

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
NAME = "shifted-products"


@pytest.fixture
def page() -> dict:
    """What the page's code leaves behind, run from the top, with its mechanism in the table."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict = {"__name__": "page"}
    try:
        for block in blocks:
            exec(block, namespace)
        yield namespace
    finally:
        attention.MECHANISMS.pop(NAME, None)


def test_the_page_runs_and_its_mechanism_keeps_the_contract(page):
    assert attention.mechanism_class(NAME) is page["ShiftedProductAttention"]
    case = Case(NAME, {"shifts": 2}, kv_heads=2)
    contract.test_changing_tokens_changes_nothing_before_them(case, 11)
    contract.test_forward_equals_extend_over_a_split(case, [1, 7, 1, 1, 20, 7])
    contract.test_left_padding_changes_nothing(case, 5)
    contract.test_grouped_queries_equal_each_query_head_with_its_own_key_head(case)
    contract.test_gradients_reach_every_parameter_and_input(case)


def test_a_broken_mechanism_would_be_found(page, monkeypatch):
    def backwards(self, x):
        return page["torch"].flip(x, (2,)).relu().repeat(1, 1, 1, 4)

    monkeypatch.setattr(page["ShiftedProducts"], "map", backwards)
    with pytest.raises(AssertionError):
        contract.test_changing_tokens_changes_nothing_before_them(Case(NAME, {"shifts": 2}, kv_heads=2), 11)
