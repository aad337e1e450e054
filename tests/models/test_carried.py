"""Documents that are longer than a row: each row is given what its tokens give in one pass over the document so far."""

import pytest
import torch

from attention.mutation import Mutant, apply
from models.test_over_ranks import EXACT, KINDS
from models.test_transformer_lm import SHOWN, VOCAB, build, tokens
from polysketch.attention.beside_window import BesideWindow
from polysketch.attention.linearized import LinearizedAttention
from polysketch.models import TransformerLM
from polysketch.models.carried import CarriedRows, hidden_states_of
from polysketch.nn import ContinuedDocuments

ROW, LANES = 12, 3
# Lanes of rows: lengths of documents one after the other. The long ones begin and end where rows do not; in the third
# row all three go on, at unlike places, two of which are alike in chunks of 8. In one row a document ends and the next
# goes on.
DOCUMENTS = ([5, 34, 1, 8], [3, 4, 38, 3], [13, 30, 5])
ROWS = sum(DOCUMENTS[0]) // ROW
EVERY_KIND = [pytest.param(x, marks=[pytest.mark.full] * (x not in SHOWN.split())) for x in KINDS]
FEW = ("around", "polysketch", "hybrid")
FEW_KINDS = [pytest.param(x, marks=[pytest.mark.full] * (x not in FEW)) for x in KINDS]
"""Decayed sums behind open chunks, the delta rule, states of unlike layers; the others are in the full product."""


def streams() -> tuple[torch.Tensor, torch.Tensor]:
    """Of each lane, ids and targets (LANES, tokens): every token of a document predicts one, the last its end."""
    ids = tokens(LANES, ROW * ROWS, seed=2)
    targets = ids.roll(-1, 1)
    for lane, lengths in enumerate(DOCUMENTS):
        for end in torch.tensor(lengths).cumsum(0).tolist():
            targets[lane, end - 1] = 0
    return ids, targets


def layout(row: int) -> ContinuedDocuments:
    """What stands in a row of each lane."""
    begin, stop = row * ROW, (row + 1) * ROW
    bounds, positions, goes_on = [0], [], []
    for lane, lengths in enumerate(DOCUMENTS):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        bounds += [
            lane * ROW + min(end, stop) - begin
            for start, end in zip(starts, ends, strict=True)
            if end > begin and start < stop
        ]
        positions.append(next(max(begin - start, 0) for start, end in zip(starts, ends, strict=True) if end > begin))
        goes_on.append(all(end != stop for end in ends))
    return ContinuedDocuments(torch.tensor(bounds, dtype=torch.int32), LANES, positions=positions, goes_on=goes_on)


def of_row(x: torch.Tensor, row: int) -> torch.Tensor:
    return x[:, row * ROW : (row + 1) * ROW].reshape(1, -1)


def losses_row_by_row(model: TransformerLM, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(LANES, tokens) losses, each row with the states that the one before left."""
    found, states = [], {}
    for row in range(ROWS):
        rows = CarriedRows(layout(row), states)
        hidden = model.hidden_states(of_row(ids, row), carried=rows)
        found.append(model.token_losses(hidden, of_row(targets, row)).view(LANES, ROW))
        states = rows.after
    return torch.cat(found, 1)


def losses_in_one_pass(model: TransformerLM, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same, of each document by itself."""
    lanes = []
    for lane, lengths in enumerate(DOCUMENTS):
        parts = zip(ids[lane, None].split(lengths, 1), targets[lane, None].split(lengths, 1), strict=True)
        lanes.append(torch.cat([model.token_losses(model.hidden_states(x), y.contiguous()) for x, y in parts], 1))
    return torch.cat(lanes)


def test_the_documents_of_these_tests_begin_end_and_go_on_in_every_way():
    parts = [part for row in range(ROWS) for part in layout(row).parts]
    assert any(part.position and part.goes_on and part.tokens == ROW for part in parts)
    assert any(part.position and not part.goes_on and part.tokens < ROW for part in parts)
    assert any(not part.position and part.goes_on and part.tokens < ROW for part in parts)
    assert any(layout(row).others is None for row in range(ROWS))
    assert any(len(layout(row).others.lengths) > 1 for row in range(ROWS) if layout(row).others is not None)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_loss_of_each_row_is_that_of_one_pass_over_the_documents(kind: str):
    model = build(kind)
    expected = losses_in_one_pass(model, *streams())
    torch.testing.assert_close(losses_row_by_row(model, *streams()), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["around", "polysketch", "hybrid"])
def test_what_came_before_the_row_carries_weight(kind: str):
    """The losses of a row are others where the document began with it."""
    model, (ids, targets) = build(kind), streams()
    carried = losses_in_one_pass(model, ids, targets)[1, 2 * ROW : 3 * ROW]
    alone = model.token_losses(
        model.hidden_states(of_row(ids, 2)[:, ROW : 2 * ROW]), of_row(targets, 2)[:, ROW : 2 * ROW].contiguous()
    )
    assert ((carried - alone[0]).abs() > 1e-3).sum() > ROW // 2


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_gradients_are_those_of_the_row_with_the_states_as_numbers(kind: str):
    model, (ids, targets), states = build(kind), streams(), {}
    for row in range(ROWS):
        rows = CarriedRows(layout(row), states)
        loss = model.loss(of_row(ids, row), of_row(targets, row), carried=rows)
        found = torch.autograd.grad(loss, list(model.parameters()))
        expected = gradients_by_spans(model, of_row(ids, row), of_row(targets, row), layout(row), states)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        states = rows.after
        left = [tensor for layers in states.values() for state in layers for tensor in state.tensors.values()]
        assert not any(tensor.requires_grad for tensor in left)


def gradients_by_spans(model: TransformerLM, ids, targets, documents: ContinuedDocuments, states) -> list[torch.Tensor]:
    """Of the mean over a row of each lane, every document computed apart, by `forward_span` of each block."""
    positions = documents.positions().tolist()
    starts = [place for place in range(len(positions)) if place % ROW == 0 or positions[place] == 0]
    losses = []
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        before = states[start // ROW] if positions[start] else model.init_spans(1)
        hidden, rotation = model.begin_span(ids[:, start:stop], positions[start])
        for block, state in zip(model.blocks, before, strict=True):
            hidden, _ = block.forward_span(hidden, state, rotation)
        losses.append(model.end_span(hidden, targets[:, start:stop]).sum())
    return list(torch.autograd.grad(sum(losses) / ids.numel(), list(model.parameters())))


def changed_before(ids: torch.Tensor, lane: int, stop: int) -> torch.Tensor:
    changed = ids.clone()
    changed[lane, :stop] = (changed[lane, :stop] + 1) % VOCAB
    return changed


def check_documents_apart(model: TransformerLM) -> None:
    """The documents before change no bit of the losses of the next ones, in their lane and in the others."""
    ids, targets = streams()
    before = losses_row_by_row(model, ids, targets)
    for lane, end in ((0, 40), (2, 13)):
        after = losses_row_by_row(model, changed_before(ids, lane, end), targets)
        assert torch.equal(before[lane, end:], after[lane, end:])
        others = [other for other in range(LANES) if other != lane]
        assert torch.equal(before[others], after[others])
        assert (before[lane, :end] != after[lane, :end]).all()


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_no_token_of_a_document_changes_the_next_one(kind: str):
    check_documents_apart(build(kind))


STALE = "return [state.at(0) for state in self.before[part.row]] if part.row in self.before else None"


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (CarriedRows._state, "return None", STALE),
        (ContinuedDocuments.__init__, "_offsets(whole)", "_offsets([sum(whole)])"),
    ],
    ids=["the state of the document before", "whole documents as one"],
)
def test_a_reset_that_is_missed_is_seen(function, before: str, after: str, monkeypatch: pytest.MonkeyPatch):
    apply(Mutant(function, before, after, ()), monkeypatch)
    with pytest.raises(AssertionError):
        check_documents_apart(build("around"))


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (ContinuedDocuments.positions, "- before", ""),
        (hidden_states_of, "arange(part.position, part.position + part.tokens", "arange(part.tokens"),
        pytest.param(hidden_states_of, "else each[layer] for", "else each[0] for", marks=pytest.mark.full),
        pytest.param(LinearizedAttention.alike_position, "chunk + position % chunk", "chunk", marks=pytest.mark.full),
    ],
    ids=["positions anew", "rotations anew", "the first layer's states", "unlike places of a chunk"],
)
def test_a_place_or_state_that_is_not_the_document_s_is_seen(function, before, after, monkeypatch: pytest.MonkeyPatch):
    model = build("around", input_positions=True)
    expected = losses_in_one_pass(model, *streams())
    apply(Mutant(function, before, after, ()), monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(losses_row_by_row(model, *streams()), expected)


def test_a_window_that_is_not_full_is_not_like_one_that_is(monkeypatch: pytest.MonkeyPatch):
    model = build("polysketch")
    expected = losses_in_one_pass(model, *streams())
    apply(Mutant(BesideWindow.alike_position, "min(position, self.window)", "self.window", ()), monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(losses_row_by_row(model, *streams()), expected)


@pytest.mark.parametrize(
    ("kind", "batches"), [("polysketch", [3]), ("linear", [3]), ("around", [1, 2]), ("hybrid", [3])]
)
def test_lanes_at_alike_places_are_one_batch(kind: str, batches: list[int], monkeypatch: pytest.MonkeyPatch):
    model, (ids, _), sizes = build(kind), streams(), []
    mixer = type(model.blocks[0].attention)
    plain = mixer.forward_span
    monkeypatch.setattr(
        mixer, "forward_span", lambda self, x, *given: (sizes.append(len(x)), plain(self, x, *given))[1]
    )
    states = {}
    for row in range(3):
        sizes.clear()
        rows = CarriedRows(layout(row), states)
        model.hidden_states(of_row(ids, row), carried=rows)
        states = rows.after
    assert sorted(sizes[: len(batches)]) == batches


def test_activation_checkpointing_changes_no_bit():
    model, (ids, targets) = build("around"), streams()
    grads = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        losses_row_by_row(model, ids, targets).sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", sorted(EXACT))
def test_a_layer_without_a_state_of_constant_size_is_named(kind: str):
    with pytest.raises(NotImplementedError, match=r"layer 0: \w+ has no state of constant size"):
        losses_row_by_row(build(kind), *streams())


def test_a_row_out_of_turn_is_refused():
    model, (ids, targets) = build(), streams()
    with pytest.raises(
        ValueError, match="row 0 goes on with a document after 7 tokens, expected the states there, got none"
    ):
        model.hidden_states(of_row(ids, 1), carried=CarriedRows(layout(1), {}))
    first = CarriedRows(layout(0), {})
    model.loss(of_row(ids, 0), of_row(targets, 0), carried=first)
    with pytest.raises(ValueError, match=r"row 0 goes on with a document after 19 tokens.*got those after 7"):
        model.hidden_states(of_row(ids, 2), carried=CarriedRows(layout(2), first.after))


def test_what_does_not_fit_is_refused():
    model, ids = build(), tokens(1, LANES * ROW)
    rows = CarriedRows(layout(0), {})
    with pytest.raises(ValueError, match="need targets"):
        model.loss(ids, carried=rows)
    with pytest.raises(ValueError, match="neither cu_seqlens nor context"):
        model.loss(ids, ids, torch.tensor([0, 24], dtype=torch.int32), carried=rows)
    with pytest.raises(ValueError, match="expected one row of 36 tokens, got"):
        model.loss(ids[:, :12], ids[:, :12], carried=rows)
    with pytest.raises(ValueError, match="a document to begin with each of 2 equal rows of 24 tokens"):
        ContinuedDocuments(torch.tensor([0, 11, 24], dtype=torch.int32), 2, positions=[0, 0], goes_on=[False, False])
    with pytest.raises(ValueError, match="expected 2 positions and ends, got 1 and 2"):
        ContinuedDocuments(torch.tensor([0, 12, 24], dtype=torch.int32), 2, positions=[0], goes_on=[False, False])
