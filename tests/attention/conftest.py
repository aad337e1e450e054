"""The case table as a fixture: a test that takes `case` runs on every one."""

import pytest

from attention.cases import CASES, Case


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """One mechanism with its options."""
    return request.param
