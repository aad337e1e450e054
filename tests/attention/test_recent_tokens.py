"""The ring of recent tokens: holds the last ones in their slots, whatever the split and the padding."""

import pytest
import torch

from polysketch import attention, ops
from polysketch.attention import RecentTokens

CAPACITY = 5


def tokens(count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that carry their own index, from one on."""
    index = torch.arange(start + 1, start + count + 1, dtype=torch.float32).view(1, 1, -1, 1)
    return index.expand(2, 3, -1, 4).clone(), -index.expand(2, 3, -1, 2).clone()


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [3, 1, 8], [5, 5, 2], [4, 4, 4]])
def test_a_token_stands_in_the_slot_of_its_position(sizes: list[int]):
    state, start = RecentTokens(2, CAPACITY), 0
    for size in sizes:
        state.append(*tokens(size, start))
        start += size
    key, value, real = state.slots(*tokens(1))
    assert key[0, 0, :, 0].tolist() == [11, 12, 8, 9, 10]
    assert value[1, 2, :, 1].tolist() == [-11, -12, -8, -9, -10]
    assert real.all()
    assert state.position.tolist() == [12, 12]


@pytest.mark.parametrize("sizes", [[1] * 9, [9], [2, 7], [4, 1, 4]])
def test_padding_before_a_row_takes_no_slot_and_a_masked_token_takes_one(sizes: list[int]):
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    mask[0, 6] = False
    state = RecentTokens(2, CAPACITY)
    for part, key, value in zip(mask.split(sizes, 1), *(x.split(sizes, 2) for x in tokens(9)), strict=True):
        state.append(key, value, part)
    key, _, real = state.slots(*tokens(1))
    assert state.position.tolist() == [6, 9]
    assert key[0, 0, :, 0].tolist() == [9, 5, 6, 0, 8]
    assert real[0].tolist() == [True, True, True, False, True]
    assert key[1, 0, :, 0].tolist() == [6, 7, 8, 9, 5]


def test_the_size_is_constant():
    state = RecentTokens(2, CAPACITY)
    state.append(*tokens(1))
    nbytes, address = state.nbytes, state.slots(*tokens(1))[0].data_ptr()
    for size in (1, 3, 100):
        state.append(*tokens(size))
        assert state.nbytes == nbytes
        assert state.slots(*tokens(1))[0].data_ptr() == address


def test_other_batches_and_widths_are_refused():
    state = RecentTokens(2, CAPACITY)
    with pytest.raises(ValueError, match="the state holds 2 rows, got a batch of 1"):
        state.append(*(x[:1] for x in tokens(3)))
    state.append(*tokens(3))
    with pytest.raises(ValueError, match=r"\(3, 4, 2\), got \(3, 2, 4\)"):
        state.append(tokens(3)[1], tokens(3)[0])


def test_a_dtype_asked_for_is_kept():
    keys, values, _ = RecentTokens(2, CAPACITY, dtype=torch.bfloat16).slots(*tokens(3))
    assert keys.dtype == values.dtype == torch.bfloat16


def test_a_window_of_the_length_or_more_is_the_softmax_mechanism():
    query, key, value = torch.randn(3, 2, 4, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    window = attention.build("sliding-window", num_heads=4, head_dim=8, window=20)
    softmax = attention.build("softmax", num_heads=4, head_dim=8)
    torch.testing.assert_close(window(query, key, value), softmax(query, key, value))


def test_a_chunk_of_the_length_or_more_is_the_polynomial_mechanism():
    query, key, value = torch.randn(3, 2, 4, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    local = attention.build("local", num_heads=4, head_dim=8, local_chunk=20, degree=2).double()
    polynomial = attention.build("polynomial", num_heads=4, head_dim=8, degree=2).double()
    torch.testing.assert_close(local(query, key, value), polynomial(query, key, value))


def test_local_attention_norms_its_queries_and_keys_and_adds_one_to_the_mass():
    query, key, value = 0.1 * torch.randn(
        3, 1, 2, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    local = attention.build("local", num_heads=2, head_dim=8, local_chunk=8).double()
    normed = local.query_norm(query), local.key_norm(key)
    expected = ops.local_attention(*normed, value, chunk=8, offset=1.0, causal=True)
    torch.testing.assert_close(local(query, key, value), expected)
    assert not torch.allclose(expected, ops.local_attention(query, key, value, chunk=8, causal=True))


@pytest.mark.parametrize("padding", [0, 2], ids=["rows at one position", "rows at two"])
@pytest.mark.parametrize("earlier", [3, 5, 8])
def test_the_kept_tokens_come_from_the_oldest_on_and_then_the_new_ones(earlier: int, padding: int):
    mask = torch.ones(2, earlier, dtype=torch.bool)
    mask[0, :padding] = False
    state = RecentTokens(2, CAPACITY)
    state.append(*tokens(earlier), mask if padding else None)
    keys, values, real = state.followed_by(*tokens(2, earlier), None)
    for row, first in ((0, 1 + padding), (1, 1)):
        kept = [*range(first, earlier + 1)][-CAPACITY:]
        expected = [*[0] * (CAPACITY - len(kept)), *kept, earlier + 1, earlier + 2]
        assert keys[row, 0, :, 0].tolist() == expected
        assert values[row, 1, :, 1].tolist() == [-each for each in expected]
        assert real[row].tolist() == [each > 0 for each in expected]


@pytest.mark.parametrize("rows", [[0, 2], [-1, 0], [0]])
def test_rows_that_a_pool_lacks_are_refused(rows: list[int]):
    pool = RecentTokens(2, CAPACITY)
    position = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="found an empty one"):
        RecentTokens.rows_of(pool, torch.tensor([0, 1]), position)
    pool.append(*tokens(3))
    with pytest.raises(ValueError, match=r"expected (rows from 0 to 1|2 rows)"):
        RecentTokens.rows_of(pool, torch.tensor(rows), position)
    swapped = RecentTokens.rows_of(pool, torch.tensor([1, 0]), position)
    assert torch.equal(swapped.clone().slots(*tokens(1))[0], pool.slots(*tokens(1))[0].flip(0))
