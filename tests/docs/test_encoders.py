"""The table of docs/encoders.md says what the mechanisms themselves say, in all cases of the contract tests."""

import re

from attention.cases import CASES
from attention.test_contract_blocks import SIZES, can
from docs.pages import ROOT
from polysketch.attention import MECHANISMS

ROW = re.compile(r"^\| `([\w-]+)` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


def answer(values: list[bool]) -> str:
    return "yes" if all(values) else "some" if any(values) else "-"


def test_the_table_says_what_mechanisms_can():
    rows = {row[0]: list(row[1:]) for row in ROW.findall((ROOT / "docs" / "encoders.md").read_text())}
    assert rows.keys() == set(MECHANISMS)
    for name, told in rows.items():
        built = [case.build() for case in CASES if case.name == name]
        asked = [[getattr(each, what) for each in built] for what in ("is_causal", "is_bidirectional", "is_cross")]
        asked.append([can(each, size) for each in built for size in SIZES])
        assert told == [answer(values) for values in asked], name
