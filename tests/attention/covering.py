"""Combinations of a few factors in which every pair of values occurs, and the full product."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]


def full_product(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Every combination of values."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise_covering(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Few rows that contain every pair of values of two factors; always the same ones.

    Greedy: the next row is the combination with the most pairs that no row has yet, the earliest of several. The
    number of rows is at least the product of the two largest factors, and seldom much above it.
    """
    candidates = full_product(factors)
    missing, rows = set().union(*map(_pairs, candidates)), []
    while missing:
        row = max(candidates, key=lambda candidate: len(_pairs(candidate) & missing))
        missing -= _pairs(row)
        rows.append(row)
    return rows


def pairs_always(factors: Mapping[str, Sequence[Any]]) -> list:
    """Every combination as parameters of a test, in the order of the factors: those beyond `pairwise_covering` full."""
    always = pairwise_covering(factors)
    return [
        pytest.param(*row.values(), marks=[] if row in always else pytest.mark.full) for row in full_product(factors)
    ]


def first_always(cases: Sequence[Any], number: int = 1, *, several: bool = False) -> list:
    """Cases as parameters of a test: the first ones run always, the others with the full product.

    Args:
        cases: the parameters.
        number: how many run always.
        several: whether a case is a tuple of several parameters.
    """
    others = (case if several else (case,) for case in cases[number:])
    return [*cases[:number], *(pytest.param(*case, marks=pytest.mark.full) for case in others)]


def _pairs(row: Row) -> set[tuple]:
    """The pairs of values of one row, each with the names of its factors."""
    return set(combinations(row.items(), 2))
