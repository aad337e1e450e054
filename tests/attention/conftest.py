"""The case table as a fixture: a test that takes `case` runs on every one, `causal_case` on the causal.

Those that represent a mechanism and its options run always, the others with the marker `full`.
"""

from collections.abc import Iterator

import pytest

from attention.cases import CASES, CAUSAL_CASES, COMPLETE_CASES, COMPLETE_CAUSAL_CASES, Case, forget, others_full


@pytest.fixture(params=others_full(CASES), ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """One mechanism with its options."""
    return request.param


@pytest.fixture(params=others_full(CAUSAL_CASES), ids=str)
def causal_case(request: pytest.FixtureRequest) -> Case:
    """One mechanism that can be causal, and then decode."""
    return request.param


@pytest.fixture(params=others_full(COMPLETE_CASES), ids=str)
def complete_case(request: pytest.FixtureRequest) -> Case:
    """One mechanism whose forward leaves out no token by chance."""
    return request.param


@pytest.fixture(params=others_full(COMPLETE_CAUSAL_CASES), ids=str)
def complete_causal_case(request: pytest.FixtureRequest) -> Case:
    """One mechanism that can be causal, and whose forward is what decoding gives."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_kept_of_what_a_test_changes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cases keep what they built; a test that changes the library gets what it changed, and leaves none of it."""
    changes = "monkeypatch" in request.fixturenames
    if changes:
        forget()
    yield
    if changes:
        forget()
