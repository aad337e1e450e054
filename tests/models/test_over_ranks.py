"""A language model over rows that are cut into tiles: what it gives for whole rows, gradients too; here by one process.

tests/distributed has several.
"""

import pytest
import torch

from attention.covering import first_always
from attention.mutation import Mutant, apply
from models.test_packed import loss_of_documents_apart, next_tokens, offsets
from models.test_transformer_lm import MODELS, SHOWN, build, tokens
from polysketch.distributed import ContextGroup
from polysketch.models import TransformerLM
from polysketch.models.documents_over_ranks import SharedDocuments
from polysketch.models.over_ranks import _Rows

EXACT = {"softmax", "polynomial", "squared-polynomial", "hyper", "polysketch-heavy", "mixed", "around-softmax"}
KINDS = sorted(set(MODELS) - EXACT)


def gradients(model: TransformerLM, **options) -> list[torch.Tensor]:
    """Loss and all gradients."""
    loss = model.loss(tokens(2, 30), **options)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[pytest.mark.full] * (x not in SHOWN.split())) for x in KINDS])
def test_tiles_give_what_whole_rows_give(kind: str):
    model = build(kind)
    expected = gradients(model)
    for tiles in (1, 3):
        for one, other in zip(gradients(model, context=ContextGroup(tiles=tiles)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kind", "tiles"),
    first_always(
        [
            *(("around", 1), ("around", 4), ("linear", 2), ("hybrid", 4)),
            *(("around", 2), ("linear", 1), ("linear", 4), ("hybrid", 1), ("hybrid", 2)),
        ],
        4,
        several=True,
    ),
)
def test_what_adds_up_is_found_of_all_tiles_at_once(kind: str, tiles: int, monkeypatch: pytest.MonkeyPatch):
    """Chunks of 8 end where the tiles do; the first layer of the hybrid has no sums."""
    model, ids, ran = build(kind), tokens(2, 33), []
    expected = torch.autograd.grad(model.loss(ids), list(model.parameters()))
    for way in ("run_by_sums", "run_in_order"):
        plain = getattr(_Rows, way)
        monkeypatch.setattr(_Rows, way, lambda *given, way=way, plain=plain: (ran.append(way), plain(*given)))
    loss = model.loss(ids, context=ContextGroup(tiles=tiles))
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert ran == ["run_in_order", "run_by_sums", "run_in_order"] if kind == "hybrid" else ["run_by_sums"] * 2


@pytest.mark.parametrize("tiles", [1, 4])
def test_activation_checkpointing_changes_no_bit(tiles: int):
    model = build("around")  # its chunks of 8 do not end where tiles do
    expected = gradients(model, context=ContextGroup(tiles=tiles))
    model.activation_checkpointing = True
    for one, other in zip(gradients(model, context=ContextGroup(tiles=tiles)), expected, strict=True):
        assert torch.equal(one, other)


def test_a_model_that_is_not_trained_is_evaluated():
    model = build("polysketch")
    with torch.no_grad():
        loss = model.loss(tokens(2, 30), context=ContextGroup(tiles=2))
    torch.testing.assert_close(loss, model.loss(tokens(2, 30)))


def test_targets_are_weighed_as_in_whole_rows():
    model, ids = build("polysketch"), tokens(2, 30)
    targets = ids.roll(-1, 1)
    targets[0, :17] = targets[1, 20:] = -100
    torch.testing.assert_close(model.loss(ids, targets, context=ContextGroup(tiles=5)), model.loss(ids, targets))


def test_a_layer_without_a_state_of_constant_size_is_named():
    with pytest.raises(NotImplementedError, match="layer 0: SoftmaxAttention has no state of constant size"):
        build("mixed").loss(tokens(2, 30), context=ContextGroup(tiles=2))


CUT = [7, 1, 34, 2, 1, 19]
"""Documents of which edges of 4 tiles of 16 cut the third twice and the last one once."""


def check_documents(model: TransformerLM, lengths: list[int], tiles: int) -> None:
    """A packed row in tiles gives what its documents give apart, gradients too."""
    ids, targets = next_tokens(lengths)
    expected = loss_of_documents_apart(model, ids, targets, lengths)
    loss = model.loss(ids, targets, offsets(lengths), context=ContextGroup(tiles=tiles))
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


FEW = ("around", "polysketch", "hybrid")


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[pytest.mark.full] * (x not in FEW)) for x in KINDS])
def test_a_packed_row_in_tiles_gives_what_its_documents_give_apart(kind: str):
    model = build(kind)
    for tiles in (1, 4):
        check_documents(model, CUT, tiles)


@pytest.mark.parametrize("lengths", first_always([[1] * 6 + [58], [15, 17, 31, 1], [64], [16] * 4], 2), ids=str)
def test_documents_may_end_anywhere(lengths: list[int]):
    check_documents(build("polysketch"), lengths, 4)


MISTAKES = {
    "a part that begins anew": (SharedDocuments._run_part, "state = after[number - 1]", "pass"),
    "positions in the row": (SharedDocuments._begin, "tokens, piece.position", "tokens, piece.tokens.start"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_packed_rows_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch):
    function, before, after = MISTAKES[mistake]
    apply(Mutant(function, before, after, ()), monkeypatch)
    with pytest.raises(AssertionError):
        check_documents(build("polysketch"), CUT, 4)


def test_documents_predict_their_own_next_token_where_no_targets_are_given():
    model, (ids, targets) = build("polysketch"), next_tokens(CUT)
    context = ContextGroup(tiles=4)
    given = model.loss(ids, targets, offsets(CUT), context=context)
    assert torch.equal(model.loss(ids, cu_seqlens=offsets(CUT), context=context), given)


def test_what_cannot_be_cut_is_refused():
    model, ids = build("polysketch"), tokens(1, 12)
    with pytest.raises(ValueError, match="11 tokens cannot be cut into 12 tiles"):
        model.loss(ids, context=ContextGroup(tiles=12))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        model.loss(ids[:, :1], context=ContextGroup())
