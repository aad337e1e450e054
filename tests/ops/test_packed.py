"""Packed documents: what stands in one row is laid into batches, and comes back, exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polysketch.ops import PackedDocuments

LENGTHS = [9, 1, 8, 37, 7, 1, 20]


def offsets(lengths: list[int]) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def documents_of(x: Tensor, lengths: list[int], dim: int) -> list[Tensor]:
    """The documents of a packed row, one by one."""
    return list(x.split(lengths, dim))


def row(lengths: list[int], dim: int = 2) -> Tensor:
    shape = [1, 3, 4, 2]
    shape[dim] = sum(lengths)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


EVERY_LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=EVERY_LENGTHS, dim=st.integers(1, 3))
def test_every_document_is_a_row_and_comes_back(lengths: list[int], dim: int):
    documents, x = PackedDocuments(offsets(lengths)), row(lengths, dim)
    parts, apart = documents.split(x, dim), documents_of(x, lengths, dim)
    for group, part in zip(documents.groups, parts, strict=True):
        assert part.shape[0] == len(group.documents)
        assert part.shape[dim] == group.length == max(group.lengths)
        for number, rows in zip(group.documents, part, strict=True):
            assert torch.equal(rows[None].narrow(dim, 0, lengths[number]), apart[number])
            last = apart[number].narrow(dim, lengths[number] - 1, 1)
            padding = rows[None].narrow(dim, lengths[number], group.length - lengths[number])
            assert torch.equal(padding, last.expand_as(padding))
    assert sorted(number for group in documents.groups for number in group.documents) == list(range(len(lengths)))
    assert torch.equal(documents.join(parts, dim), x)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=80))
def test_padding_is_at_most_an_eighth_of_the_tokens(lengths: list[int]):
    documents = PackedDocuments(offsets(lengths))
    assert documents.total == sum(lengths)
    assert documents.total <= documents.padded_total <= documents.total * 9 / 8
    assert documents.longest == max(lengths)


def test_groups_are_few():
    generator = torch.Generator().manual_seed(0)
    lengths = (16 * 128 ** torch.rand(80, generator=generator, dtype=torch.float64)).long().tolist()
    assert len(set(lengths)) > 60
    assert len(PackedDocuments(offsets(lengths)).groups) <= 14


def test_documents_of_one_length_are_a_view():
    documents, x = PackedDocuments(offsets([5, 5, 5])), row([5, 5, 5])
    (part,) = documents.split(x, 2)
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert documents.padded_total == documents.total
    assert documents.masks() == [None]


def test_masks_tell_real_tokens_from_padding():
    documents = PackedDocuments(offsets(LENGTHS))
    assert [group.lengths for group in documents.groups] == [(1, 1), (9, 8, 7), (20,), (37,)]
    mask = documents.masks()[1]
    assert mask.sum(1).tolist() == [9, 8, 7]
    assert mask.cummin(1).values.equal(mask)
    assert [found is None for found in documents.masks()] == [True, False, True, True]


def test_positions_begin_anew_in_every_document():
    documents = PackedDocuments(offsets(LENGTHS))
    assert documents.positions().tolist() == [place for length in LENGTHS for place in range(length)]
    assert (documents.last_tokens() + 1).tolist() == offsets(LENGTHS)[1:].tolist()


@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6, 6]])
def test_gradients_go_to_their_tokens_and_padding_has_none(lengths: list[int]):
    documents, x = PackedDocuments(offsets(lengths)), row(lengths).requires_grad_()
    small = row([2, 1, 3] if lengths == LENGTHS else [2, 2]).requires_grad_()
    few = PackedDocuments(offsets([2, 1, 3] if lengths == LENGTHS else [2, 2]))
    assert torch.autograd.gradcheck(lambda x: few.join([part.sin() for part in few.split(x, 2)], 2), small)
    assert torch.autograd.gradgradcheck(lambda x: few.join([part.sin() for part in few.split(x, 2)], 2), small)
    parts = [part.detach().requires_grad_() for part in documents.split(x, 2)]
    documents.join(parts, 2).backward(x.detach())
    for part, laid, mask in zip(parts, documents.split(x.detach(), 2), documents.masks(), strict=True):
        kept = torch.ones_like(part) if mask is None else mask[:, None, :, None]
        assert torch.equal(part.grad, laid * kept)


# PyTorch's own, as it reads its formulas of forward mode for the first time.
@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_go_the_same_way():
    documents, x = PackedDocuments(offsets(LENGTHS)), row(LENGTHS)
    laid_and_back = lambda x: documents.join([2 * part for part in documents.split(x, 2)], 2)  # noqa: E731
    _, tangent = torch.func.jvp(laid_and_back, (x,), (x.cos(),))
    assert torch.equal(tangent, 2 * x.cos())


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (torch.tensor([0, 3, 9]), TypeError, "must be an int32 tensor, got torch.int64"),
        (torch.tensor([0.0, 3.0]), TypeError, "got torch.float32"),
        ([0, 3, 9], TypeError, "must be an int32 tensor, got list"),
        (torch.tensor([[0, 3]], dtype=torch.int32), ValueError, r"must be \(documents \+ 1,\), got \(1, 2\)"),
        (torch.tensor([0], dtype=torch.int32), ValueError, r"got \(1,\)"),
        (torch.tensor([3, 9], dtype=torch.int32), ValueError, "must start at 0, got 3; are these lengths"),
        (torch.tensor([0, 3, 3, 9], dtype=torch.int32), ValueError, "must rise.* document 1 is from 3 to 3"),
        (torch.tensor([0, 5, 3, 9], dtype=torch.int32), ValueError, "must rise.* document 1 is from 5 to 3"),
    ],
)
def test_offsets_that_divide_nothing_are_refused(cu_seqlens, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        PackedDocuments(cu_seqlens)


def test_rows_that_do_not_fit_are_refused():
    documents = PackedDocuments(offsets([4, 5]))
    with pytest.raises(ValueError, match="must end at the length of the row, 8, got 9"):
        PackedDocuments.of_row(documents, torch.Size((1, 8)))
    with pytest.raises(ValueError, match="a batch of 1 is expected, got 2 rows"):
        PackedDocuments.of_row(offsets([4, 5]), torch.Size((2, 9)))
    with pytest.raises(ValueError, match="cu_seqlens and key_mask exclude each other"):
        PackedDocuments.of_row(documents, torch.Size((1, 9)), torch.ones(1, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="must end at the length of the row, 10, got 9"):
        documents.split(torch.zeros(1, 10))
    assert PackedDocuments.of_row(documents, torch.Size((1, 9))) is documents
