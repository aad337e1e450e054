"""Documents packed into one row of a language model: each gives what it gives alone."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attention.covering import first_always
from attention.mutation import Mutant, apply
from models.test_transformer_lm import MODELS, SHOWN, VOCAB, build, tokens
from polysketch import nn
from polysketch.models import TransformerLM
from polysketch.ops import PackedDocuments

LENGTHS = [9, 1, 8, 37, 7, 2, 20]


def offsets(lengths: list[int]) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# A state of each kind, and all that stands around a mechanism.
@pytest.fixture(params=[pytest.param(x, marks=[pytest.mark.full] * (x not in SHOWN.split())) for x in sorted(MODELS)])
def model(request: pytest.FixtureRequest) -> TransformerLM:
    return build(request.param)


def next_tokens(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(1, total) ids, and targets that end with each document."""
    ids = tokens(1, sum(lengths))
    ends = [torch.cat([part[:, 1:], part.new_full((1, 1), -100)], 1) for part in ids.split(lengths, 1)]
    return ids, torch.cat(ends, 1)


def loss_of_documents_apart(model: TransformerLM, ids: Tensor, targets: Tensor, lengths: list[int]) -> Tensor:
    parts = zip(ids.split(lengths, 1), targets.split(lengths, 1), strict=True)
    summed = [cross_entropy(model(part)[0], wanted[0], reduction="sum") for part, wanted in parts]
    return torch.stack(summed).sum() / (targets != -100).sum()


def check_a_packed_row(model: TransformerLM, lengths: list[int]) -> None:
    ids, targets = next_tokens(lengths)
    apart = torch.cat([model(part) for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(model(ids, cu_seqlens=offsets(lengths)), apart)
    expected = loss_of_documents_apart(model, ids, targets, lengths)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = model.loss(ids, targets, offsets(lengths))
    torch.testing.assert_close(loss, expected)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", first_always([LENGTHS, [12, 12, 12]]), ids=["unequal", "equal"])
def test_a_packed_row_equals_its_documents_apart(model: TransformerLM, lengths: list[int]):
    check_a_packed_row(model, lengths)


def test_changing_one_document_changes_no_bit_of_another(model: TransformerLM):
    ids, changed = tokens(1, sum(LENGTHS)), torch.zeros(1, sum(LENGTHS), dtype=torch.bool)
    changed[:, 10:18] = True
    before, after = (model(x, cu_seqlens=offsets(LENGTHS)) for x in (ids, torch.where(changed, (ids + 1) % VOCAB, ids)))
    assert torch.equal(before[~changed], after[~changed])
    assert (before - after)[changed].abs().amax(-1).min() > 1e-6


def test_activation_checkpointing_gives_the_same_gradients(model: TransformerLM):
    ids, targets = next_tokens(LENGTHS)
    grads = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        model.loss(ids, targets, offsets(LENGTHS)).backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_documents_predict_their_own_next_token_where_no_targets_are_given(model: TransformerLM):
    ids, targets = next_tokens(LENGTHS)
    given = model.loss(ids, targets, offsets(LENGTHS))
    assert torch.equal(model.loss(ids, cu_seqlens=offsets(LENGTHS)), given)
    assert torch.equal(model.loss(ids, None, PackedDocuments(offsets(LENGTHS))), given)


def test_the_mean_is_over_what_is_predicted(model: TransformerLM):
    ids, targets = tokens(), tokens(seed=4)
    targets[0, 3:] = -100
    torch.testing.assert_close(model.loss(ids, targets), cross_entropy(model(ids).flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize(
    ("kind", "function", "before", "after"),
    [
        (
            "around",
            nn.SelfAttention._attend_packed,
            "rows, _ = self.convolution(rows)",
            "rows = self.convolution(rows.flatten(0, 1)[None])[0].view_as(rows)",
        ),
        ("polysketch", PackedDocuments.positions, "- starts.repeat_interleave(lengths)", ""),
        ("convolution", PackedDocuments.split, "unflatten(0, (len(group.documents), group.length))", "unsqueeze(0)"),
    ],
    ids=["projections convolved as one row", "positions that go on", "one short convolution"],
)
def test_a_start_that_is_missed_is_seen(kind, function, before, after, monkeypatch):
    apply(Mutant(function, before, after, ()), monkeypatch)
    with pytest.raises(AssertionError):
        check_a_packed_row(build(kind), [12, 12, 12])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": offsets([9, 1])}, "must end at the length of the row, 30, got 10"),
        ({"cu_seqlens": offsets([1] * 30)}, "nothing is to be predicted"),
        ({"targets": torch.full((1, 30), -100)}, "nothing is to be predicted: all targets are -100"),
        ({"targets": torch.full((1, 30), VOCAB)}, rf"lie in \[0, {VOCAB}\), got {VOCAB} to {VOCAB}"),
        ({"targets": torch.full((1, 30), -1)}, "got -1 to -1"),
        ({"targets": torch.zeros(1, 29, dtype=torch.int64)}, r"shape of ids, \(1, 30\), got torch.int64 of \(1, 29\)"),
        ({"targets": torch.zeros(1, 30)}, "got torch.float32"),
    ],
)
def test_a_loss_of_nothing_or_of_what_does_not_fit_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build("softmax").loss(tokens(1), **options)


def test_several_rows_and_masks_beside_offsets_are_refused():
    model = build("softmax")
    with pytest.raises(ValueError, match="a batch of 1 is expected, got 2 rows"):
        model(tokens(), cu_seqlens=offsets([30]))
    with pytest.raises(ValueError, match="exclude each other"):
        model(tokens(1), cu_seqlens=offsets([30]), key_mask=torch.ones(1, 30, dtype=torch.bool))
    with pytest.raises(TypeError, match="must be an int32 tensor"):
        model(tokens(1), cu_seqlens=torch.tensor([0, 30]))
    block, hidden = model.blocks[0], torch.zeros(1, 30, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="the rotation must be of positions 0 to 19"):
        block(hidden, nn.rotation_at(torch.arange(30), 8), cu_seqlens=offsets([20, 10]))
