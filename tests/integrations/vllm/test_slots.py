"""Requests that come and go, each with its state in a page of its own: as if each were alone. Without vLLM."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.vllm.lively import lively, prompts
from polysketch.attention import MECHANISMS, mechanism_class
from polysketch.integrations.vllm.layers import StateLayer, run_step, state_slots
from polysketch.integrations.vllm.rows import Rows, rows_of
from polysketch.integrations.vllm.slots import PageLayout, StateSlots
from polysketch.models import TransformerLM
from polysketch.ops import StateRows
from polysketch.ops.native.build import why_unavailable
from polysketch.ops.window.types import Inputs

GROWING = {"softmax", "polynomial", "squared-polynomial", "hyper"}
NOT_CAUSAL = {"nystrom", "skyformer"}
OTHER_STATES = {"polysketch", "polysketch-heavy", "polysketch-paper", "focused", "sliding-window", "short-convolution"}
"""Each has a state of another form; those of the others are of these forms."""
LAYERS = [
    pytest.param(
        name, options, id=f"{name} {options}", marks=[] if name in OTHER_STATES and not number else pytest.mark.full
    )
    for name in sorted({*MECHANISMS, "short-convolution"} - GROWING - NOT_CAUSAL)
    for number, options in enumerate(mechanism_class(name).examples if name in MECHANISMS else ({},))
]
LAYERS.append(pytest.param("performer", {"local_chunk": 8}, id="performer, which reads its open chunk itself"))


class Server:
    """Runs steps as vLLM would: requests with one new token first, pages wherever there is room."""

    def __init__(self, model: TransformerLM, pages: int) -> None:
        self.model = model
        self.rows: list[Any] = []
        self.layers = [StateLayer(block, state_slots(block), lambda: self.rows) for block in model.blocks]
        for layer in self.layers:  # what was in a page before must not matter
            layer.slots.bind(torch.full((pages, layer.slots.layout.nbytes + 64), 0xA5, dtype=torch.uint8))

    def step(self, new: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        """(page, tokens seen before, new ids) of each request -> hidden states of its new tokens."""
        starts = [0, *torch.tensor([len(ids) for _, _, ids in new]).cumsum(0).tolist()]
        ends = [seen + len(ids) for _, seen, ids in new]
        self.rows = rows_of(starts, ends, [page for page, _, _ in new])
        ids = torch.tensor([token for _, _, ids in new for token in ids])
        positions = torch.cat([torch.arange(seen, seen + len(ids)) for _, seen, ids in new])
        return list(run_step(self.model, self.layers, ids, positions).split([len(ids) for _, _, ids in new]))


def serve(server: Server, texts: list[list[int]], pages: list[int], seed: int) -> list[Tensor]:
    """Each text in random parts, some requests at every step; those that are done make room for others."""
    draw, found = random.Random(seed), [[] for _ in texts]
    waiting, running, free = list(range(len(texts))), {}, list(pages)
    while waiting or running:
        while waiting and free:
            running[waiting.pop(0)] = (free.pop(draw.randrange(len(free))), 0)
        chosen = draw.sample(sorted(running), draw.randint(1, len(running)))
        parts = {}
        for request in chosen:
            page, seen = running[request]
            parts[request] = (page, seen, texts[request][seen : seen + draw.choice([1, 1, 1, 2, 7, 20])])
        order = sorted(chosen, key=lambda request: len(parts[request][2]))
        for request, hidden in zip(order, server.step([parts[request] for request in order]), strict=True):
            found[request].append(hidden)
            page, seen, ids = parts[request]
            running[request] = (page, seen + len(ids))
            if seen + len(ids) == len(texts[request]):
                free.append(running.pop(request)[0])
    return [torch.cat(parts) for parts in found]


def model_of(name: str, options: dict[str, Any]) -> TransformerLM:
    """Two layers of a mechanism."""
    small = {"hidden_size": 32, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    return lively(attention=name, attention_options=dict(options), **small).double()


@torch.no_grad()
def alone(model: TransformerLM, text: list[int]) -> Tensor:
    """(tokens, hidden_size) of the whole text."""
    return model.hidden_states(torch.tensor([text]))[0]


@pytest.mark.parametrize(("name", "options"), LAYERS)
def test_requests_that_share_steps_are_as_if_each_were_alone(name, options):
    model, texts = model_of(name, options), prompts(1, 9, 37, 45, 21)
    found = serve(Server(model, 5), texts, [3, 1, 4], seed=len(name))
    for text, hidden in zip(texts, found, strict=True):
        torch.testing.assert_close(hidden, alone(model, text), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["polysketch", "polysketch-paper"])
@pytest.mark.skipif(why_unavailable() is not None, reason="needs a compiler")
def test_steps_of_several_requests_move_on_in_their_pages(name, monkeypatch):
    """In float32, as they are served: no sums and no window are copied."""
    model, texts = model_of(name, mechanism_class(name).examples[0]), prompts(30, 41, 22, 17)
    expected = [alone(model, text) for text in texts]
    monkeypatch.setattr(StateRows, "gathered", lambda self: pytest.fail("sums were copied"))
    monkeypatch.setattr(Inputs, "taken", lambda self, rows: pytest.fail("a window was copied"))
    found = serve(Server(model.float(), 5), texts, [3, 1, 4], seed=0)
    for hidden, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(hidden.double(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrong", ["page", "position", "not written", "left by another"])
def test_whatever_is_wrong_with_a_state_is_seen(wrong, monkeypatch):
    model, texts = model_of("polysketch", mechanism_class("polysketch").examples[0]), prompts(30, 41, 22, 17)
    break_it(wrong, monkeypatch)
    found = serve(Server(model, 5), texts, [3, 1], seed=0)
    apart = [(hidden - alone(model, text)).abs().max() for text, hidden in zip(texts, found, strict=True)]
    assert max(apart) > 1e-3


def break_it(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mistake in reading or writing states."""
    read, write, slots = StateSlots.read, StateSlots.write, StateSlots
    if wrong == "page":
        monkeypatch.setattr(slots, "read", lambda self, pages, at: read(self, [4 - page for page in pages], at))
    elif wrong == "position":
        monkeypatch.setattr(slots, "read", lambda self, pages, at: read(self, pages, at - 1))
    elif wrong == "not written":
        monkeypatch.setattr(slots, "write", lambda self, pages, state: len(pages) > 1 or write(self, pages, state))
    else:
        monkeypatch.setattr(Rows, "is_fresh", property(lambda self: False))


@pytest.mark.parametrize("name", sorted(GROWING))
def test_a_state_that_grows_is_refused(name):
    with pytest.raises(ValueError, match="constant size"):
        state_slots(lively(attention=name).blocks[0])


def test_steps_of_one_token_are_taken_together_and_first_tokens_apart():
    rows = rows_of([0, 1, 2, 3, 3, 7], [5, 9, 1, 0, 4], [2, 7, 5, 9, 3])
    assert [(each.first, each.length, each.pages, each.position.tolist()) for each in rows] == [
        (0, 1, [2, 7], [4, 8]),
        (2, 1, [5], [0]),
        (3, 4, [3], [0]),
    ]


def test_tensors_of_all_dtypes_stand_in_a_page_without_overlap():
    tensors = [torch.rand(3, 5).double(), torch.rand(3, 2, 2) > 0.5, torch.arange(3), torch.rand(3, 0, 4)]
    layout = PageLayout.of(tensors)
    views = layout.views(torch.zeros(3, layout.nbytes + 8, dtype=torch.uint8))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
