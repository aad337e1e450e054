"""Messages that refuse a mechanism name those that can, and these are all that can."""

import re

import pytest
import torch

from polysketch import attention
from polysketch.attention import MECHANISMS, mechanisms_that, mechanisms_that_cross

WHOLE = " with local_chunk=None"
INPUTS = torch.randn(3, 1, 1, 6, 8, generator=torch.Generator().manual_seed(0))


def built(listed: str) -> attention.Mechanism:
    """As a message lists it."""
    name, whole, _ = listed.partition(WHOLE)
    return attention.build(name, num_heads=1, head_dim=8, **({"local_chunk": None} if whole else {}))


def attends(mechanism: attention.Mechanism, *, causal: bool) -> bool:
    try:
        mechanism(*INPUTS, causal=causal)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("ability", "causal"), [("is_causal", True), ("is_bidirectional", False)])
def test_those_are_listed_that_attend_so(ability, causal):
    assert mechanisms_that(ability) == [name for name in MECHANISMS if attends(built(name), causal=causal)]
    assert 0 < len(mechanisms_that(ability)) < len(MECHANISMS)


def test_several_abilities_are_those_of_both_lists():
    both = mechanisms_that("is_causal", "is_bidirectional")
    assert both == [name for name in mechanisms_that("is_causal") if name in mechanisms_that("is_bidirectional")]


def test_those_are_listed_that_read_another_sequence_and_the_others_refuse():
    query, key, value = INPUTS
    listed = mechanisms_that_cross()
    for each in listed:
        mechanism = built(each)
        found = mechanism.ask_source(query[:, :, :4], mechanism.read_source(key, value))
        assert found.isfinite().all()
    for name in MECHANISMS.keys() - {each.removesuffix(WHOLE) for each in listed}:
        with pytest.raises(ValueError, match=re.escape(f"mechanisms that can: {', '.join(listed)}") + "$"):
            built(name).read_source(key, value)
    for each in listed:
        if WHOLE in each:
            assert not built(each.removesuffix(WHOLE)).is_cross


def test_attention_to_a_window_and_a_key_beside_it_names_those_that_see_both_sides():
    listed = ", ".join(mechanisms_that("is_bidirectional"))
    with pytest.raises(
        ValueError, match=re.escape(f"on the order of tokens; mechanisms that see both sides: {listed}")
    ):
        built("polysketch")(*INPUTS, causal=False, unrotated=(INPUTS[0], INPUTS[1]))
