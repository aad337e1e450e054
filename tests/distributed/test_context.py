"""Rows shared by 2 and 4 processes: the bits of one process, constant traffic, and mistakes that are seen."""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from attention.mutation import Mutant, apply
from distributed.ranks import run_on_ranks
from models.test_packed import offsets
from polysketch.distributed import ContextGroup, context
from polysketch.models import ModelConfig, TransformerLM

RANKS, LAYERS, TILES = 4, 2, 4
KINDS: dict[str, dict[str, Any]] = {
    "polysketch": {"attention_options": {"window": 6, "sketch_size": 4, "far_bias": 1.0}, "projection_convolution": 4},
    "polysketch-paper": {
        "attention": "polysketch-paper",
        "attention_options": {"sketch_size": 6, "local_chunk": 8, "decay_gate": True},
    },
    "sums": {
        "attention": "polysketch-paper",
        "attention_options": {"sketch_size": 6, "local_chunk": 11, "decay_gate": True},
        "projection_convolution": 4,
    },
    "hybrid": {
        "attention": ("short-convolution", "sliding-window"),
        "attention_options": {"sliding-window": {"window": 5}},
    },
}
"""A state by the delta rule, decayed sums behind open chunks, such sums at boundaries of chunks behind a convolution,
and states of tokens alone."""

_ZEROS, _CUT = "[x * 0 for x in tensors]", "[x.detach() for x in tensors]"
WRONG = {
    "a missed state": ("polysketch", ContextGroup.receive, "anchor, tensors", f"anchor, {_ZEROS}"),
    "no gradient to the ranks before": ("polysketch", ContextGroup.receive, "anchor, tensors", f"anchor, {_CUT}"),
    "missed sums": ("sums", context._Before.forward, "every[group.rank * len(own) :]", "every"),
    "no gradient to the sums before": ("sums", context._Before.backward, "*zeros", "*(0 * each for each in zeros)"),
    "a missed halo": ("sums", ContextGroup.receive, "anchor, tensors", f"anchor, {_ZEROS}"),
    "another order of a sum": ("polysketch", ContextGroup._sum, "folded(parts", "sum(parts"),
}
DOCUMENTS = [20, 1, 75, 11, 7, 18]
"""Edges of four tiles of 33 cut the third twice and the fourth once; a rank has nothing but a part of the third."""
"""Of a kind, a function, what stands in it, and what a mistake would have in its place."""
SEEN_BY_THE_LOSS = {"a missed state", "missed sums", "a missed halo"}


def build(kind: str, dtype: torch.dtype = torch.float32) -> TransformerLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "num_layers": LAYERS, "hidden_size": 16, "num_heads": 2}
    model = TransformerLM(ModelConfig(**{**sizes, **KINDS[kind]}))
    for parameter in model.parameters():  # nothing stays zero or the identity
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


class Step(nn.Module):
    """A model's loss as a call, which `CommDebugMode` asks for."""

    def __init__(self, model: TransformerLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, context: ContextGroup) -> torch.Tensor:
        return self.model.loss(ids, context=context)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: TransformerLM, context: ContextGroup | None, length: int = 132) -> list[torch.Tensor]:
    """Loss and the gradients of all ranks together."""
    model.zero_grad()
    loss = model.loss(tokens(length), context=context)
    loss.backward()
    if context is not None:
        context.sum_gradients(model.parameters())
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def document_gradients(model: TransformerLM, context: ContextGroup | None) -> list[torch.Tensor]:
    """As `gradients`, of a packed row."""
    model.zero_grad()
    loss = model.loss(tokens(sum(DOCUMENTS), 1), cu_seqlens=offsets(DOCUMENTS), context=context)
    loss.backward()
    if context is not None:
        context.sum_gradients(model.parameters())
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@functools.cache
def of_one_process(kind: str, step: Callable[..., list[torch.Tensor]] = gradients) -> list[torch.Tensor]:
    """What a step gives without other ranks: the first one computes it, and tells the others."""
    model = build(kind)
    if dist.get_rank() == 0:
        found = [each.clone() for each in step(model, ContextGroup(tiles=TILES))]
    else:
        found = [torch.empty(()), *(torch.empty_like(parameter) for parameter in model.parameters())]
    for tensor in found:
        dist.broadcast(tensor.detach(), 0)
    return found


def groups() -> dict[int, dist.ProcessGroup]:
    """All ranks, and the first two."""
    return {4: dist.group.WORLD, 2: dist.new_group([0, 1])}


def bits() -> dict[str, Any]:
    """Of each kind, ranks and whether inside of blocks is computed again: whether the bits are those of one process."""
    found, of = {}, groups()
    for kind in KINDS:
        model, expected = build(kind), of_one_process(kind)
        for ranks, group in of.items():
            for again in (False, True):
                model.activation_checkpointing = again
                if dist.get_rank() < ranks:
                    shared = gradients(model, ContextGroup(group, tiles=TILES))
                    found[f"{kind}, {ranks} ranks, {again}"] = same_bits(shared, expected)
    return found


def document_bits() -> dict[str, Any]:
    """As `bits`, of a packed row whose documents are cut."""
    found, of = {}, groups()
    for kind in ("polysketch", "hybrid"):
        model, expected = build(kind), of_one_process(kind, document_gradients)
        model.activation_checkpointing = True
        for ranks, group in of.items():
            if dist.get_rank() < ranks:
                shared = document_gradients(model, ContextGroup(group, tiles=TILES))
                found[f"{kind}, {ranks} ranks"] = same_bits(shared, expected)
    return found


def wrong_document_bits() -> dict[str, Any]:
    """With each mistake: whether loss and gradients of a packed row still are those of one process."""
    found = {}
    for name in ("a missed state", "no gradient to the ranks before"):
        kind, function, before, after = WRONG[name]
        model, expected = build(kind), of_one_process(kind, document_gradients)
        with pytest.MonkeyPatch.context() as patch:
            apply(Mutant(function, before, after, ()), patch)
            wrong = document_gradients(model, ContextGroup(dist.group.WORLD))
        found[name] = [bool(torch.equal(wrong[0], expected[0])), same_bits(wrong[1:], expected[1:])]
    return found


def wrong_bits() -> dict[str, Any]:
    """With each mistake: whether loss and gradients still are those of one process."""
    found = {}
    for name, (kind, function, before, after) in WRONG.items():
        model, expected = build(kind), of_one_process(kind)
        with pytest.MonkeyPatch.context() as patch:
            apply(Mutant(function, before, after, ()), patch)
            wrong = gradients(model, ContextGroup(dist.group.WORLD))
        found[name] = [bool(torch.equal(wrong[0], expected[0])), same_bits(wrong[1:], expected[1:])]
    return found


def difference() -> dict[str, Any]:
    """The largest difference to the gradients of whole rows by one process, in float64."""
    found = {}
    for kind in ("polysketch", "sums"):
        model = build(kind, torch.float64)
        pairs = zip(gradients(model, ContextGroup(dist.group.WORLD)), gradients(model, None), strict=True)
        found[kind] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    model = build("polysketch", torch.float64)
    pairs = zip(document_gradients(model, ContextGroup(dist.group.WORLD)), document_gradients(model, None), strict=True)
    found["documents"] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    return found


def document_traffic() -> dict[str, Any]:
    """Messages of a step on packed rows."""
    model, found = build("polysketch"), {}
    for name, lengths in {"cut": DOCUMENTS, "cut once": [33, 13, 20, 66]}.items():
        ranks = ContextGroup(dist.group.WORLD)
        ids = tokens(132, 1)
        model.loss(ids, cu_seqlens=offsets(lengths), context=ranks).backward()
        found[name] = ranks.traffic.messages
    return found


def traffic() -> dict[str, Any]:
    """Messages, bytes and collectives of a step at two lengths, and what `CommDebugMode` sees of it."""
    found: dict[str, Any] = {}
    for kind in ("polysketch", "sums"):
        model, found[kind] = build(kind), []
        for length in (89, 265):
            ranks = ContextGroup(dist.group.WORLD)
            seen = seen_by_pytorch(model, length) if kind == "polysketch" else None
            with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers:
                model.loss(tokens(length), context=ranks).backward()
            found[kind].append([ranks.traffic.messages, ranks.traffic.bytes, gathers.call_count, seen])
    return found


def seen_by_pytorch(model: TransformerLM, length: int) -> dict[str, int]:
    """The collectives that `CommDebugMode` counts; it loses its way where a layer is called twice."""
    with warnings.catch_warnings(), CommDebugMode() as seen:
        warnings.simplefilter("ignore")  # of its own hooks on modules that are given tokens
        Step(model)(tokens(length), ContextGroup(dist.group.WORLD)).backward()
    return {str(name): count for name, count in seen.get_comm_counts().items()}


def unlike() -> dict[str, Any]:
    """What is said to rows that differ, and what becomes of a rank that has nothing to predict."""
    model, ids = build("polysketch"), tokens(64)
    mine = ids.clone()
    mine[0, 40] += int(dist.get_rank() == 2) * (1 if ids[0, 40] < 22 else -1)
    ranks = ContextGroup(dist.group.WORLD)
    try:
        model.loss(mine, context=ranks)
        said = ""
    except RuntimeError as error:
        said = str(error)
    halves = [31, 33] if dist.get_rank() == 2 else [32, 32]
    try:
        model.loss(ids[:1], cu_seqlens=offsets(halves), context=ranks)
        said_of_documents = ""
    except RuntimeError as error:
        said_of_documents = str(error)
    targets = ids.roll(-1, 1)
    targets[:, 48:] = -100
    loss = model.loss(ids, targets, context=ranks)
    loss.backward()
    return {
        "said": said,
        "said_of_documents": said_of_documents,
        "loss": float(loss.detach()),
        "whole": float(model.loss(ids, targets).detach()),
    }


SCENES: tuple[Callable[[], dict[str, Any]], ...] = (
    bits,
    wrong_bits,
    document_bits,
    wrong_document_bits,
    difference,
    traffic,
    document_traffic,
    unlike,
)


def all_scenes() -> dict[str, Any]:
    """Everything by one start of the processes."""
    return {scene.__name__: scene() for scene in SCENES}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(RANKS, all_scenes)


def test_outputs_and_gradients_have_the_bits_of_one_process(found):
    of_all = [one for each in found for one in each["bits"].items()]
    assert len(of_all) == len(KINDS) * 2 * (4 + 2)
    assert all(same for _, same in of_all), [name for name, same in of_all if not same]


def test_packed_rows_have_the_bits_of_one_process(found):
    """Of documents that edges of tiles cut, once and twice."""
    of_all = [one for each in found for one in each["document_bits"].items()]
    assert len(of_all) == 2 * (4 + 2)
    assert all(same for _, same in of_all), [name for name, same in of_all if not same]


def test_a_mistake_in_packed_rows_is_seen(found):
    for each in found:
        assert each["wrong_document_bits"] == {
            "a missed state": [False, False],
            "no gradient to the ranks before": [True, False],
        }


def test_packed_rows_send_nothing_but_documents_that_are_cut(found):
    """Two messages a layer, forward and backward, for each edge that cuts one."""
    sent = [each["document_traffic"]["cut"] for each in found]
    assert sent == [LAYERS, 2 * LAYERS, 2 * LAYERS, LAYERS]
    assert [each["document_traffic"]["cut once"] for each in found] == [0, 0, LAYERS, LAYERS]


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_seen(found, mistake: str):
    losses, grads = zip(*(each["wrong_bits"][mistake] for each in found), strict=True)
    assert not any(grads)
    assert all(losses) == (mistake not in SEEN_BY_THE_LOSS)


def test_gradients_are_those_of_whole_rows(found):
    assert max(largest for each in found for largest in each["difference"].values()) < 1e-10


def test_what_a_layer_sends_does_not_depend_on_the_length(found):
    for rank, each in enumerate(found):
        forward, backward = int(rank < RANKS - 1), int(rank > 0)
        for kind, gathers in (("polysketch", 0), ("sums", 2)):
            short, long = each["traffic"][kind]
            assert short == long
            # A message to either side, and what adds up and its gradient to all.
            assert short[0] == LAYERS * (forward + backward + gathers)
            assert short[1] > 0
            # Collectives: the rows' digests, the loss, and what adds up.
            assert short[2] == 2 + LAYERS * gathers
        assert each["traffic"]["polysketch"][0][3] == {"c10d.allgather_": 2}


def test_rows_that_differ_are_refused_on_every_rank(found):
    for each in found:
        for said in (each["unlike"]["said"], each["unlike"]["said_of_documents"]):
            assert "ids, targets and documents must be the same on all 4 ranks" in said
            assert "on rank 2" in said


def test_a_rank_without_anything_to_predict_takes_part(found):
    for each in found:
        assert each["unlike"]["loss"] == pytest.approx(each["unlike"]["whole"], rel=1e-6)
