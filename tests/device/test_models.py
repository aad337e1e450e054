"""The language model on a device: against float64 on the CPU, its own decoding, autocast, and captured graphs."""

import copy

import pytest
import torch
from torch import Tensor

from device.yardstick import Device, assert_within
from generation.recording import recorded, split_positions
from polysketch.attention import MECHANISMS, option_names
from polysketch.generation import captured, generate
from polysketch.models import ModelConfig, TransformerLM

VOCABULARY = 257
CAUSAL = [name for name, mechanism in MECHANISMS.items() if mechanism.is_causal]
AROUND = "polysketch with all around it"
PARTS_AROUND = {"projection_convolution": 4, "query_key_norm": True, "head_gate": True}
KINDS = [*CAUSAL, AROUND]


def away_from_the_identity(model: TransformerLM) -> TransformerLM:
    """A model of `AROUND`, whose convolutions blend tokens and whose gates differ."""
    for block in model.blocks:
        for part in (block.attention.convolution, block.attention.query_key_norm, block.attention.head_gate):
            for parameter in part.parameters():
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def model_and_ids(name: str, device: Device) -> tuple[TransformerLM, Tensor]:
    """Two layers of two heads of 64, every mechanism with a local part given a small one; tokens on the device."""
    torch.manual_seed(0)
    length, local = (50, 16) if device.small else (500, 128)
    around = PARTS_AROUND if name == AROUND else {}
    name = "polysketch-paper" if around else name
    options = {"local_chunk": local} if "local_chunk" in option_names(name) else {}
    model = TransformerLM(ModelConfig(VOCABULARY, 2, 128, 2, attention=name, attention_options=options, **around))
    model = away_from_the_identity(model) if around else model
    return model, torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(model: TransformerLM, ids: Tensor) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter."""
    loss = model.loss(ids)
    loss.backward()
    gradients = {f"gradient of {name}": weight.grad for name, weight in model.named_parameters()}
    with torch.no_grad():
        return {"logits": model(ids), "loss": loss.detach(), **gradients}


@pytest.mark.parametrize("name", KINDS)
def test_logits_loss_and_gradients_are_those_of_float64(name, computer, record_property):
    model, ids = model_and_ids(name, computer)
    exact = copy.deepcopy(model).double()
    found = loss_and_gradients(model.to(computer.where), ids.to(computer.where))
    assert_within(found, loss_and_gradients(exact, ids), 1e-3, record_property)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_uneven_spans_give_the_logits_of_the_whole(name, computer, record_property):
    model, ids = model_and_ids(name, computer)
    model, ids = model.to(computer.where), ids.to(computer.where)
    state, length = model.init_state(ids.shape[0]), ids.shape[1]
    pieces = ids.split([1, 1, length // 3, 1, length - length // 3 - 3], dim=1)
    logits = torch.cat([model.extend(piece, state)[0] for piece in pieces], 1)
    assert_within({"logits": logits}, {"logits": model(ids)}, 1e-3, record_property)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_under_autocast_has_nearly_the_same_loss_and_learns(name, computer, record_property):
    model, ids = model_and_ids(name, computer)
    model, ids = model.to(computer.where), ids.to(computer.where)
    with torch.no_grad():
        expected = model.loss(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(computer.where.type, dtype=torch.bfloat16):
            loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert_within({"loss": losses[0]}, {"loss": expected}, 1e-2, record_property)
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    assert losses[1] < losses[0]


LOCAL = 16
STEPS = 2 * LOCAL + 5  # chunks are filled on the way, in every row at another step
PROMPT_LENGTHS = (3, 8, 1, 21)
PROMPTS = [[(7 * row + 3 * place) % VOCABULARY for place in range(n)] for row, n in enumerate(PROMPT_LENGTHS)]
SKETCHED = {
    "random": {"learned": False},
    "learned": {},
    "gated": {"decay_gate": True, "hidden_size": 128},
    AROUND: {"decay_gate": True},
}


@pytest.fixture
def graphs(computer, monkeypatch):
    """Captured graphs; on a CPU, which has none, a stand-in records the operations of a step and repeats them."""
    if computer.name == "cuda":
        return

    intact = captured.CapturedStep  # before it is replaced

    def step(model, state):
        split_positions(state)
        return intact(model, state, recorded(state))

    monkeypatch.setattr(captured, "why_no_graph", TransformerLM.why_not_captured)
    monkeypatch.setattr(captured, "CapturedStep", step)


def small_model(name: str, computer: Device, dtype: torch.dtype) -> TransformerLM:
    """Two layers; without a local part on a CPU, where a state's open chunks are positions of the host's."""
    torch.manual_seed(0)
    local = None if computer.small else LOCAL
    options = {**SKETCHED[name], "local_chunk": local, "sketch_size": 32}
    around = PARTS_AROUND if name == AROUND else {}
    config = ModelConfig(VOCABULARY, 2, 128, 2, attention="polysketch-paper", attention_options=options, **around)
    model = away_from_the_identity(TransformerLM(config)) if around else TransformerLM(config)
    return model.to(computer.where, torch.float64 if computer.small else dtype).eval()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("name", SKETCHED)
@torch.inference_mode()
def test_a_replayed_graph_decodes_as_plain_steps_do(name, dtype, tolerance, computer, record_property):
    """Twice in one process, for the second graph finds what the first one left."""
    model = small_model(name, computer, dtype)
    for _ in range(2):
        plain, state = model.init_state(len(PROMPTS)), model.init_state(len(PROMPTS))
        assert captured.why_no_graph(model, state) is None
        step = captured.CapturedStep(model, state)
        for each in (plain, state):
            read(model, each)
        chosen = torch.randint(VOCABULARY, (STEPS, len(PROMPTS)), generator=torch.Generator().manual_seed(0))
        chosen = chosen.to(computer.where)
        expected = torch.stack([model.extend(ids[:, None], plain)[0][:, -1] for ids in chosen])
        found = torch.stack([step(ids).clone() for ids in chosen])
        assert_within({"logits": found}, {"logits": expected}, tolerance, record_property)
        counted = [length + STEPS for length in PROMPT_LENGTHS]
        for part in (state, *state.layers, plain, *plain.layers):
            assert part.position.tolist() == part.device_position.tolist() == counted
        options = {"max_new_tokens": STEPS, "temperature": 0}
        assert (
            generate(model, PROMPTS, graph=True, **options).tokens
            == generate(model, PROMPTS, graph=False, **options).tokens
        )


def read(model: TransformerLM, state) -> None:
    """Prompts of several lengths, padded on the left."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in PROMPTS])
    model.extend_hidden(ids.to(model.output_bias.device), state, key_mask=mask.to(model.output_bias.device))
