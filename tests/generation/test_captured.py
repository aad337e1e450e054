"""Steps captured once and replayed: the same tokens, at the same addresses, and nothing waits for the device."""

import pytest
import torch

from attention.covering import first_always
from generation.recording import recorded, split_positions
from polysketch.generation import captured, engine, generate
from polysketch.generation.captured import CapturedStep
from polysketch.models import ModelConfig, ModelState, TransformerLM

VOCAB = 40
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]
# Without a local part nothing depends on the position but the embeddings; float64 so that no native program runs.
CAPTURABLE = {
    "polysketch-paper": ("polysketch-paper", {"local_chunk": None, "learned": False, "sketch_size": 16}),
    "learned": ("polysketch-paper", {"local_chunk": None, "sketch_size": 16, "share": "head"}),
    "gated": ("polysketch-paper", {"local_chunk": None, "sketch_size": 16, "decay_gate": True, "hidden_size": 32}),
    "linear": ("linear", {}),
    "short-convolution": (("short-convolution", "linear"), ({}, {})),
}


def build(attention, options, **changes) -> TransformerLM:
    """A small model whose next token depends on everything before it."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        attention=attention,
        attention_options=options,
        **changes,
    )
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.05 * torch.randn_like(parameter))
    return model.double().eval()


def read(model: TransformerLM, state: ModelState) -> None:
    """The prompts, so that rows stand at different positions."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in PROMPTS])
    model.extend_hidden(ids, state, key_mask=mask)


def forbid_reading(monkeypatch) -> None:
    """Nothing of a tensor may be asked for: that would wait for the device."""

    def refuse(*_, **__):
        raise AssertionError("the step waits for the device")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.parametrize(("attention", "options"), CAPTURABLE.values(), ids=CAPTURABLE)
@torch.inference_mode()
def test_replayed_steps_are_the_steps(attention, options):
    """Logits, states and positions, over several tokens; rows at different positions."""
    model = build(attention, options)
    expected_state, state = model.init_state(3), split_positions(model.init_state(3))
    assert model.why_not_captured(state) is None
    step = CapturedStep(model, state, recorded(state))
    read(model, expected_state)
    read(model, state)
    addresses = captured._addresses(state)
    for token in range(5):
        ids = torch.tensor([token, 2 * token + 1, 3])
        expected, _ = model.extend(ids[:, None], expected_state)
        torch.testing.assert_close(step(ids), expected[:, 0])
        for mine, theirs in zip((state, *state.layers), (expected_state, *expected_state.layers), strict=True):
            assert mine.position.tolist() == theirs.position.tolist()
            assert mine.device_position.tolist() == theirs.position.tolist() or not hasattr(theirs, "device_position")
    assert captured._addresses(state) == addresses
    assert [len(prompt) + 5 for prompt in PROMPTS] == state.position.tolist()


@torch.inference_mode()
def test_replayed_steps_with_convolved_projections_norms_and_gates_are_the_steps():
    """The tail of the convolution is at a fixed address, and the state within the layer's state is seen to move."""
    model = build(*CAPTURABLE["polysketch-paper"], projection_convolution=4, query_key_norm=True, head_gate=True)
    expected_state, state = model.init_state(3), split_positions(model.init_state(3))
    assert model.why_not_captured(state) is None
    step = CapturedStep(model, state, recorded(state))
    read(model, expected_state)
    read(model, state)
    for token in range(5):
        ids = torch.tensor([token, 2 * token + 1, 3])
        torch.testing.assert_close(step(ids), model.extend(ids[:, None], expected_state)[0][:, 0])
    assert [len(prompt) + 5 for prompt in PROMPTS] == state.layers[0].position.tolist()
    state.layers[0].attention.sums = state.layers[0].attention.sums.clone()
    with pytest.raises(RuntimeError, match="found it elsewhere"):
        step(ids)


@pytest.mark.parametrize(("attention", "options"), CAPTURABLE.values(), ids=CAPTURABLE)
@torch.inference_mode()
def test_a_step_asks_nothing_of_the_device(attention, options, monkeypatch):
    model = build(attention, options)
    state = model.init_state(3)
    ids = torch.tensor([[1], [2], [3]])
    model.extend(ids, state)
    monkeypatch.setattr(model, "_check_ids", lambda ids: None)  # reads ids on a CPU alone
    forbid_reading(monkeypatch)
    model.extend(ids, state)


@pytest.fixture
def replaying(monkeypatch):
    """`generate` takes a CPU for a device whose graphs are recorded; gives how many were."""
    made = []

    def step(model, state):
        made.append(1)
        split_positions(state)
        return CapturedStep(model, state, recorded(state))

    monkeypatch.setattr(captured, "why_no_graph", TransformerLM.why_not_captured)
    monkeypatch.setattr(captured, "CapturedStep", step)
    return made


@pytest.mark.parametrize("settings", first_always([{"top_k": 5}, {"temperature": 0}]))
def test_generation_by_replayed_steps_gives_the_same_tokens(settings, replaying):
    model = build(*CAPTURABLE["polysketch-paper"])
    plain = generate(model, PROMPTS, max_new_tokens=30, seed=3, graph=False, **settings)
    replayed = generate(model, PROMPTS, max_new_tokens=30, seed=3, graph=True, span=3, **settings)
    assert replayed.tokens == plain.tokens
    assert len(replaying) == 1
    assert (plain.no_graph, replayed.no_graph) == ("graph=False", None)
    assert generate(model, PROMPTS, max_new_tokens=30, seed=3, **settings).tokens == plain.tokens
    assert len(replaying) == 2


def test_few_steps_are_not_captured_unless_asked(replaying):
    model = build(*CAPTURABLE["linear"])
    assert "not worth a capture" in generate(model, PROMPTS, max_new_tokens=engine._WORTH_A_GRAPH).no_graph
    assert generate(model, PROMPTS, max_new_tokens=engine._WORTH_A_GRAPH + 1).no_graph is None
    assert generate(model, PROMPTS, max_new_tokens=2, graph=True).no_graph is None


def test_a_capture_that_fails_leaves_plain_steps_and_says_why(monkeypatch, replaying):
    model = build(*CAPTURABLE["linear"])
    expected = generate(model, PROMPTS, max_new_tokens=20, graph=False).tokens

    def fail(model, state):
        read(model, state)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "CapturedStep", fail)
    result = generate(model, PROMPTS, max_new_tokens=20)
    assert result.tokens == expected
    assert result.no_graph == "the capture failed: operation not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match=r"graph=True, but .* not permitted"):
        generate(model, PROMPTS, max_new_tokens=20, graph=True)


def test_without_a_cuda_device_there_is_no_graph_and_asking_for_one_is_refused():
    model = build(*CAPTURABLE["linear"])
    assert generate(model, PROMPTS, max_new_tokens=20).no_graph.endswith("and the model is on cpu")
    with pytest.raises(RuntimeError, match=r"graph=True, but a step cannot be captured: .* the model is on cpu"):
        generate(model, PROMPTS, max_new_tokens=20, graph=True)


@pytest.mark.parametrize(
    ("attention", "options", "reason"),
    [
        ("softmax", {}, "layer 0: SoftmaxAttention decides in host memory at every step, or its state grows"),
        (("linear", "local"), ({}, {}), "layer 1: LocalAttention"),
        ("performer", {"local_chunk": 8}, "layer 0: PerformerAttention"),
        ("polysketch-heavy", {"local_chunk": 8}, "layer 0: PolysketchHeavyAttention"),
        ("polysketch-paper", {"local_chunk": 8}, "layer 0: the triton backend"),
    ],
)
def test_layers_that_cannot_be_captured_are_named(attention, options, reason):
    """On a CPU a local part is one of them: it is the programs that decide about chunks on the device."""
    model = build(attention, options)
    assert model.why_not_captured(model.init_state(1)).startswith(reason)


@torch.inference_mode()
def test_a_state_that_moves_after_the_capture_is_noticed():
    model = build(*CAPTURABLE["linear"])
    state = model.init_state(3)
    step = CapturedStep(model, state, lambda run: (run(), run)[1])
    step(torch.tensor([1, 2, 3]))
    state.layers[0].sums = state.layers[0].sums.clone()
    with pytest.raises(RuntimeError, match="found it elsewhere"):
        step(torch.tensor([1, 2, 3]))


@torch.inference_mode()
def test_the_stand_in_refuses_what_a_capture_would():
    """Else it would prove nothing: a copy from host memory, a size that depends on what is in a tensor."""
    model = build("polysketch-paper", {"local_chunk": 8, "learned": False, "sketch_size": 16})
    state = split_positions(model.init_state(3))
    with pytest.raises(AssertionError, match="mixes host and device"):
        recorded(state)(lambda: model.extend_hidden(state.position[:, None], state))
    with pytest.raises(AssertionError, match="waits for the device"):
        recorded(state)(lambda: state.device_position.nonzero())


@torch.inference_mode()
def test_a_step_that_decides_in_host_memory_is_replayed_wrongly():
    """The stand-in, like a graph, repeats the slot of the token at which it was captured."""
    model = build("polysketch-paper", {"local_chunk": 8, "learned": False, "sketch_size": 16})
    expected_state, state = model.init_state(3), split_positions(model.init_state(3))
    step, ids, wrong = CapturedStep(model, state, recorded(state)), torch.tensor([4, 5, 6]), []
    for _ in range(3):
        expected, _ = model.extend(ids[:, None], expected_state)
        wrong.append(not torch.allclose(step(ids), expected[:, 0]))
    assert any(wrong)


def test_states_know_their_positions_on_the_device_whatever_is_done_to_them():
    model = build(*CAPTURABLE["linear"])
    state = split_positions(model.init_state(3))
    read(model, state)
    lengths = [len(prompt) for prompt in PROMPTS]
    assert state.device_position.tolist() == state.layers[0].device_position.tolist() == lengths
    assert state.clone().device_position.tolist() == lengths
    assert state.reorder(torch.tensor([2, 0])).device_position.tolist() == [lengths[2], lengths[0]]
    assert state.layers[1].reorder(torch.tensor([1])).device_position.tolist() == [lengths[1]]
    state.reset_()
    assert state.device_position.tolist() == state.layers[0].device_position.tolist() == [0, 0, 0]
    assert float(state.layers[0].sums.abs().max()) == 0
