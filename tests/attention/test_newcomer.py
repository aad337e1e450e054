"""A mechanism is one file and its line in the registry: everything else that lists mechanisms finds it there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from attention import test_contract as contract
from attention.cases import examples_of
from polysketch import attention

ROOT = Path(__file__).resolve().parents[2]
FILE = '''
"""A made-up mechanism."""

from typing import Any

import torch
from torch import Tensor

from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import Elementwise


class NewcomerAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = f(s q_i) . f(s k_j), f = elu + 1.

    Nobody's paper, section 1.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        stretch: s.

    Cost: about 4 head_dim (value_dim + 1) operations a token and head.
    """

    examples = ({}, {"stretch": 0.5})

    def __init__(
        self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, stretch: float = 2.0
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        self.stretch = stretch
        self.feature_map = Elementwise(head_dim, num_kv_heads=self.num_kv_heads)

    def operands(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, hidden: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Of stretched queries and keys."""
        return super().operands(query * self.stretch, key * self.stretch, dtype, hidden)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, stretch={self.stretch}"
'''
LINE = '        "newcomer": "newcomer.NewcomerAttention",\n'
TABLE = 'MECHANISMS: TableOnDemand["type[Mechanism]"] = TableOnDemand(\n'

LISTS = [
    "tests/attention/test_contract.py",
    "tests/attention/test_contract_documentation.py",
    "tests/attention/test_contract_gradients.py",
    "tests/attention/test_contract_layouts.py",
    "tests/attention/test_contract_masked.py",
    "tests/attention/test_contract_rows.py",
    "tests/attention/test_mutants.py",
    "tests/attention/test_build.py",
    "tests/nn/test_parts.py",
    "tests/docs/test_mathematics.py",
    "tests/test_public_names.py",
]
SLOW_LISTS = ["tests/attention/test_contract_sizes.py", "tests/models/test_transformer_lm.py"]
CONCERNED = "newcomer or every_mechanism or mathematics or public_names and attention"
"""Tests that list mechanisms, and which of them concern a new one."""


def package_with_a_newcomer(folder: Path) -> Path:
    """A copy of the package with one file more and its line."""
    copy = folder / "src" / "polysketch"
    shutil.copytree(ROOT / "src" / "polysketch", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "attention" / "newcomer.py").write_text(FILE)
    registry = copy / "attention" / "registry.py"
    text = registry.read_text()
    before, table = text.split(TABLE)
    registry.write_text(before + TABLE + table.replace("\n    },\n", f"\n{LINE}    }},\n", 1))
    return copy.parent


@pytest.mark.full
@pytest.mark.parametrize("files", [LISTS, SLOW_LISTS], ids=["quick", "slow"])
def test_what_lists_mechanisms_finds_a_new_one_and_passes(files: list[str], tmp_path: Path):
    paths = [str(package_with_a_newcomer(tmp_path)), *filter(None, [os.environ.get("PYTHONPATH")])]
    which = "not full" if files is LISTS else "full or not full"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files, "-k", CONCERNED, "-m", which]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    passed = [line for line in result.stdout.splitlines() if " PASSED" in line and "newcomer" in line]
    assert len(passed) > (35 if files is LISTS else 20)


@pytest.mark.parametrize(
    ("before", "after", "seen_by"),
    [
        (
            "key * self.stretch",
            "key.roll(-1, 2) * self.stretch",
            partial(contract.test_changing_tokens_changes_nothing_before_them, changed=11),
        ),
        (
            "key * self.stretch",
            "key * key.shape[2]",
            partial(contract.test_forward_equals_extend_over_a_split, sizes=[8, 8, 8, 8, 5]),
        ),
        (
            "query * self.stretch",
            "query + query.flip(0)",
            contract.test_rows_of_the_batch_do_not_influence_one_another,
        ),
    ],
    ids=["the-future-seen", "the-length-seen", "rows-mixed"],
)
def test_the_contract_finds_a_new_mechanism_that_breaks_it(
    before: str, after: str, seen_by: Callable, monkeypatch: pytest.MonkeyPatch
):
    assert FILE.count(before) == 1
    for body, expected in ((FILE, nullcontext()), (FILE.replace(before, after), pytest.raises(AssertionError))):
        namespace: dict = {"__name__": "newcomer"}
        exec(body, namespace)
        monkeypatch.setitem(attention.MECHANISMS, "newcomer", namespace["NewcomerAttention"])
        for case in examples_of("newcomer"):
            with expected:
                seen_by(case)
