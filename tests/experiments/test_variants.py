"""The compared mechanisms are what their names say."""

import json

import pytest
import torch
from experiments.foundation.variants import VARIANTS, LocalChunks, chosen, experiment_mechanisms

from polysketch import attention


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_can_be_built_from_options_that_survive_json(variant):
    options = json.loads(json.dumps(variant.attention_options(local_chunk=8, num_heads=6)))
    with experiment_mechanisms():
        mechanism = attention.build(variant.attention, num_heads=6, head_dim=16, **options)
    assert (mechanism.has_prefix and not getattr(mechanism, "prefix_removed", False)) == variant.has_prefix


def test_half_of_the_heads_get_the_small_share_and_half_the_large_one():
    options = VARIANTS["halves"].attention_options(local_chunk=8, num_heads=6)
    assert options["prefix_gain"] == [0.05] * 3 + [0.95] * 3


def test_local_chunks_see_their_own_chunk_and_nothing_before():
    torch.manual_seed(0)
    mechanism = LocalChunks(2, 16, local_chunk=8)
    query, key, value = torch.randn(3, 1, 2, 32, 16)
    changed = value.clone()
    changed[:, :, 12] += 1  # the second chunk holds tokens 8 to 15
    moved = (mechanism(query, key, changed) - mechanism(query, key, value)).abs().amax((0, 1, 3)) > 1e-7
    assert moved[12:16].all()
    assert not moved[:12].any()
    assert not moved[16:].any()


def test_variants_are_chosen_once_in_the_order_of_the_table():
    assert [variant.name for variant in chosen(["local", "softmax", "local"])] == ["softmax", "local"]


def test_an_unknown_variant_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"unknown variant sofmax; known variants: softmax, "):
        chosen(["sofmax"])


def test_the_librarys_table_of_mechanisms_is_left_as_it_was():
    before = dict(attention.MECHANISMS)
    with experiment_mechanisms():
        assert attention.mechanism_class("local-chunks") is LocalChunks
    assert before == attention.MECHANISMS
