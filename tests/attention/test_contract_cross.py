"""What holds for every mechanism whose queries may be of another sequence than its keys."""

import pytest
import torch
from torch import Tensor

from attention.cases import BATCH, CASES, HEAD_DIM, HEADS, Case
from polysketch import attention
from polysketch.attention.source import KeptSource

ASKED, LENGTH = 11, 37
CROSS = [case for case in CASES if case.example.is_cross and not case.leaves_out]
OTHERS = [case for case in CASES if case.example.is_bidirectional and not case.example.is_cross]
TIGHT = {"rtol": 1e-8, "atol": 1e-9}


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 11 tokens, keys and values of 37."""
    query, key, value, _ = case.inputs()
    return query[:, :, :ASKED], key, value


def mask() -> Tensor:
    """Padding on both sides of the second row."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[1, :3] = real[1, 30:] = False
    return real


def test_the_mechanisms_that_can():
    """A change here is one of the table in docs/choosing.md."""
    names = {case.name for case in CROSS}
    assert names == {
        *("softmax", "polynomial", "squared-polynomial", "hyper", "llops", "based", "hedgehog"),
        *("symmetric-power", "linear", "performer", "polysketch-paper"),
    }


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_every_query_is_answered_by_itself(case: Case):
    """However many there are: a decoder asks one at a time."""
    mechanism, (query, key, value) = case.build(), tensors(case)
    together = mechanism(query, key, value, causal=False)
    apart = [mechanism(query[:, :, i : i + 1], key, value, causal=False) for i in range(ASKED)]
    torch.testing.assert_close(torch.cat(apart, 2), together, **TIGHT)
    assert (together[:, :, 1:] - together[:, :, :-1]).abs().max() > 1e-3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CROSS, ids=str)
def test_a_source_that_is_read_once_answers_as_forward_does(case: Case, masked: bool):
    mechanism, (query, key, value) = case.build(), tensors(case)
    key_mask = mask() if masked else None
    expected = mechanism(query, key, value, causal=False, key_mask=key_mask)
    source = mechanism.read_source(key, value, key_mask=key_mask)
    found = [mechanism.ask_source(part, source) for part in query.split([1, 1, ASKED - 2], 2)]
    torch.testing.assert_close(torch.cat(found, 2), expected, **TIGHT)
    rows = torch.tensor([1, 1, 0])
    swapped = mechanism.ask_source(query[rows], source.reorder(rows))
    torch.testing.assert_close(swapped, expected[rows], **TIGHT)


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_padding_of_the_source_changes_nothing(case: Case):
    mechanism, (query, key, value) = case.build(), tensors(case)
    garbage = torch.where(mask()[:, None, :, None], 0.0, 50.0)
    found = mechanism(query, key + garbage, value + garbage, causal=False, key_mask=mask())
    alone = mechanism(query[1:], key[1:, :, 3:30], value[1:, :, 3:30], causal=False)
    torch.testing.assert_close(found[1:], alone, **TIGHT)


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_sources_and_queries_of_other_shapes_are_refused(case: Case):
    """What broadcasts by chance, too: one row, one head, a mask of one token."""
    mechanism, (query, key, value) = case.build(), tensors(case)
    for keys, values, key_mask in (
        (key[:, :1].repeat(1, 3, 1, 1), value, None),
        (key, value[:1], None),
        (key, value[:, :, :-1], None),
        (key[..., :-1], value, None),
        (key, value, mask()[:, :1]),
    ):
        with pytest.raises(ValueError, match="must"):
            mechanism.read_source(keys, values, key_mask=key_mask)
    source = mechanism.read_source(key, value)
    for queries in (query[:, :1], query[..., :-1], query[0]):
        with pytest.raises(ValueError, match="query must be"):
            mechanism.ask_source(queries, source)


@pytest.mark.parametrize("name", ["based", "linear", "symmetric-power"])
def test_what_is_kept_of_a_source_does_not_grow_with_it_on_features(name: str):
    mechanism = attention.build(name, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=1)
    sizes = [mechanism.read_source(*torch.randn(2, BATCH, 1, n, HEAD_DIM)).nbytes for n in (10, 1000)]
    assert sizes[0] == sizes[1]
    kept = attention.build("softmax", num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=1)
    source = kept.read_source(*torch.randn(2, BATCH, 1, 10, HEAD_DIM))
    assert isinstance(source, KeptSource)
    assert source.nbytes == 2 * BATCH * 10 * HEAD_DIM * 4


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_mechanisms_that_need_the_same_tokens_say_so(case: Case):
    mechanism, (query, key, value) = case.build(), tensors(case)
    with pytest.raises(ValueError, match=f"{type(mechanism).__name__} needs queries and keys of the same tokens"):
        mechanism.read_source(key, value)
    with pytest.raises(ValueError, match=r"keys|lengths"):
        mechanism(query, key, value, causal=False)
