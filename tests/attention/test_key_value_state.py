"""The store of keys and values: grows by doubling, keeps masks and positions, copies what it should."""

import pytest
import torch

from polysketch.attention import KeyValueRows, KeyValueState, advance_positions, build


def tokens(count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that carry their own index."""
    index = torch.arange(start, start + count, dtype=torch.float32).view(1, 1, -1, 1)
    return index.expand(2, 3, -1, 4).clone(), -index.expand(2, 3, -1, 5).clone()


def test_appended_tokens_come_back_in_order_over_every_growth():
    state, start = KeyValueState(2), 0
    for count in (1, 70, 1, 200, 3):
        keys, values, mask = state.append(*tokens(count, start))
        start += count
        assert mask is None
    expected = tokens(start)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    assert state.position.tolist() == [275, 275]


def test_buffers_double_so_that_appending_is_constant_time():
    state, addresses = KeyValueState(2), set()
    for start in range(1000):
        keys, _, _ = state.append(*tokens(1, start))
        addresses.add(keys.data_ptr())
    assert len(addresses) <= 5  # 64, 128, ..., 1024
    assert state.nbytes < 2 * 1000 * 2 * 3 * 9 * 4 + 100


def test_a_mask_that_appears_late_leaves_earlier_tokens_real():
    state = KeyValueState(2)
    state.append(*tokens(70))
    late = torch.tensor([[True, False], [True, True]])
    _, _, mask = state.append(*tokens(2, 70), late)
    assert mask[:, :70].all()
    assert torch.equal(mask[:, 70:], late)
    _, _, mask = state.append(*tokens(100, 72))
    assert mask.sum().item() == 2 * 172 - 1


def test_positions_count_from_the_first_real_token():
    mask = torch.tensor([[False, False, True, False, True], [True] * 5, [False] * 5])
    positions, after = advance_positions(torch.zeros(3, dtype=torch.int64), 5, mask)
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0] * 5]
    assert after.tolist() == [3, 5, 0]
    positions, after = advance_positions(after, 2, torch.tensor([[False, True], [True, True], [False, True]]))
    assert positions.tolist() == [[3, 4], [5, 6], [0, 0]]
    assert after.tolist() == [5, 7, 1]


def test_a_clone_does_not_see_later_tokens():
    state = KeyValueState(2)
    state.append(*tokens(3))
    copy = state.clone()
    state.append(*tokens(2, 100))
    keys, _, _ = copy.append(*tokens(1, 3))
    assert torch.equal(keys, tokens(4)[0])
    assert copy.position.tolist() == [4, 4]


def test_a_clone_has_no_more_room_than_its_tokens():
    state = KeyValueState(2)
    state.append(*tokens(70))
    state.append(*tokens(1, 70))
    bytes_of_tokens = 71 * 2 * 3 * (4 + 5) * 4
    assert state.nbytes > bytes_of_tokens + 16
    assert state.clone().nbytes == bytes_of_tokens + 16  # and two positions
    assert state.token_bytes * 71 == bytes_of_tokens


def test_room_that_is_reserved_is_made_once_and_exactly():
    for first in (3, 70):
        state, addresses = KeyValueState(2), set()
        state.reserve(100)
        for start, count in ((0, first), *((n, 1) for n in range(first, 100))):
            keys, _, _ = state.append(*tokens(count, start))
            addresses.add(keys.data_ptr())
        assert len(addresses) == 1
        assert state.nbytes == 100 * state.token_bytes + 16
        keys, _, _ = state.append(*tokens(1, 100))  # more than was reserved
        assert torch.equal(keys, tokens(101)[0])


def test_rows_of_unlike_lengths_attend_as_they_do_alone():
    torch.manual_seed(0)
    attention = build("softmax", num_heads=2, head_dim=4)
    lengths, new = (5, 1, 70), [torch.randn(3, 2, 1, 4) for _ in range(3)]
    states, expected = [], []
    for row, length in enumerate(lengths):
        past = [torch.randn(1, 2, length, 4) for _ in range(3)]
        states.append(attention.extend(*past, attention.init_state(1))[1])
        expected.append(attention.extend(*(x[row : row + 1] for x in new), states[-1].clone())[0])
    output, rows = attention.extend(*new, KeyValueRows(states))
    assert torch.equal(output, torch.cat(expected))
    assert rows.position.tolist() == [6, 2, 71]
    assert rows.reorder(torch.tensor([2, 0, 2])).position.tolist() == [71, 6, 71]
    assert rows.clone().nbytes < rows.nbytes == sum(state.nbytes for state in states)


def test_other_batches_and_widths_are_refused():
    state = KeyValueState(2)
    with pytest.raises(ValueError, match="the state holds 2 rows, got a batch of 1"):
        state.append(*(x[:1] for x in tokens(3)))
    state.append(*tokens(3))
    with pytest.raises(ValueError, match=r"\(3, 4, 5\), got \(3, 5, 4\)"):
        state.append(tokens(3)[1], tokens(3)[0])


def test_a_dtype_asked_for_is_kept():
    keys, values, _ = KeyValueState(2, dtype=torch.bfloat16).append(*tokens(3))
    assert keys.dtype == values.dtype == torch.bfloat16


def test_buffers_that_grow_keep_the_dtype_of_the_first_key():
    """Half precision that comes later rounds nothing that is kept, and its values stand beside keys of one dtype."""
    state = KeyValueState(2)
    key, value = torch.randn(2, 3, 70, 8), torch.randn(2, 3, 70, 5)
    state.append(key, value.double())
    state.append(key.bfloat16(), value.bfloat16())
    kept = state.tensors()
    assert {x.dtype for x in kept.values()} == {torch.float32}
    assert torch.equal(kept["key"][:, :, :70], key)
    assert torch.equal(kept["value"][:, :, :70], value)
