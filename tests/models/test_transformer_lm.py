"""The language model: causal, the same forward and by extension, and what calibration and checkpointing promise."""

import json

import pytest
import torch
from torch import Tensor

from attention.covering import first_always
from polysketch import attention
from polysketch.models import ModelConfig, TransformerLM
from polysketch.nn import (
    SHORT_CONVOLUTION,
    HeadGate,
    ProjectionConvolution,
    QueryKeyNorm,
    rotation_at,
    sinusoidal_positions,
)

VOCAB, LENGTH = 23, 30
CHUNKED = {"sketch_size": 6, "local_chunk": 8}
AROUND = {"projection_convolution": 3, "query_key_norm": True, "head_gate": True}
GATED = {
    "attention": "polysketch-paper",
    "attention_options": {**CHUNKED, "decay_gate": True},
    "num_kv_heads": 1,
}
CAUSAL = [name for name, mechanism in attention.MECHANISMS.items() if mechanism.is_causal]
MODELS = {
    **{name: {"attention": name} for name in CAUSAL},
    "polysketch": {"attention": "polysketch", "attention_options": {"window": 6, "sketch_size": 4, "far_bias": 0.0}},
    "polysketch-paper": {"attention": "polysketch-paper", "attention_options": {**CHUNKED, "prefix_gain": 0.5}},
    "polysketch-heavy": {
        "attention": "polysketch-heavy",
        "attention_options": {**CHUNKED, "prefix_gain": 0.5, "heavy_size": 2, "hash_bits": 2},
    },
    "polysketch-window": {
        "attention": "polysketch-window",
        "attention_options": {"window": 6, "sketch_size": 6, "far_bias": 0.0},
    },
    "gated": GATED,
    "pattern": {
        "num_layers": 4,
        "attention": ("based", "sliding-window"),
        "attention_options": {"sliding-window": {"window": 5}, "based": {"feature_dim": 4}},
    },
    "convolution": {"attention": "short-convolution"},
    "hybrid": {
        "num_layers": 3,
        "attention": ("short-convolution", "based", "sliding-window"),
        "attention_options": {"sliding-window": {"window": 5}, "based": {"feature_dim": 4}},
        "rotary": ("sliding-window",),
        "input_positions": False,
    },
    "mixed": {"attention": ("softmax", "polysketch-paper"), "attention_options": ({}, CHUNKED)},
    "around": {**GATED, **AROUND},
    "around-softmax": {"attention": "softmax", **AROUND},
}


# A state of each kind, and all that stands around a mechanism; the contract of mechanisms is in tests/attention.
SHOWN = "around convolution focused hybrid hyper linear mixed polysketch polysketch-heavy softmax"


@pytest.fixture(params=[pytest.param(x, marks=[pytest.mark.full] * (x not in SHOWN.split())) for x in sorted(MODELS)])
def model(request: pytest.FixtureRequest) -> TransformerLM:
    return build(request.param)


def build(kind: str = "polysketch-paper", seed: int = 0, **changes) -> TransformerLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    model = TransformerLM(ModelConfig(**{**sizes, **MODELS[kind], **changes})).double()
    for part in model.modules():
        if isinstance(part, ProjectionConvolution | QueryKeyNorm | HeadGate):  # which start as the identity
            for parameter in part.parameters():
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.calibrate(tokens(seed=9))
    return model


def tokens(rows: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_the_state_of_a_mixture_is_the_states_of_its_layers():
    model = build("pattern")
    _, state = model.extend(tokens(), model.init_state(2))
    ring, sums = state.layers[1], state.layers[0]
    assert (ring.capacity, type(sums).__name__) == (5, "LinearAttentionState")
    assert state.nbytes == 2 * (ring.nbytes + sums.nbytes) + 2 * 8
    _, later = model.extend(tokens(seed=5), state.clone())
    assert later.nbytes == state.nbytes


def test_every_mechanism_is_tested_in_a_model():
    used = {name for kind in MODELS for name, _ in build(kind).config.layers()}
    assert used == {*CAUSAL, SHORT_CONVOLUTION}


@pytest.mark.parametrize("changed", first_always([12, 1, LENGTH - 1]))
def test_the_model_is_causal(model: TransformerLM, changed: int):
    ids = tokens()
    other = torch.cat([ids[:, :changed], (ids[:, changed:] + 1) % VOCAB], 1)
    before, after = model(ids), model(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed])
    assert (after[:, changed:] - before[:, changed:]).abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(model(ids[:, :changed]), before[:, :changed])


@pytest.mark.parametrize("sizes", first_always([[9, 1, 1, 12, 7], [1] * LENGTH, [LENGTH]]), ids=str)
def test_forward_equals_extend_over_a_split(model: TransformerLM, sizes: list[int]):
    ids, state, outputs = tokens(), model.init_state(2), []
    for part in ids.split(sizes, dim=1):
        logits, returned = model.extend(part, state)
        assert returned is state
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), model(ids))
    assert state.position.tolist() == [LENGTH, LENGTH]
    assert not outputs[0].requires_grad


@pytest.mark.parametrize("padding", first_always([11, 3]))
def test_left_padding_changes_nothing(model: TransformerLM, padding: int):
    ids, mask = tokens(length=LENGTH + padding), torch.ones(2, LENGTH + padding, dtype=torch.bool)
    mask[0, :padding] = False
    expected = model(ids[:1, padding:]), model(ids[1:])
    found = model(ids, key_mask=mask)
    torch.testing.assert_close(found[:1, padding:], expected[0])
    torch.testing.assert_close(found[1:], expected[1])
    prefilled, state = model.extend(ids[:, :20], model.init_state(2), key_mask=mask[:, :20])
    rest = [model.extend(ids[:, i : i + 1], state)[0] for i in range(20, LENGTH + padding)]
    torch.testing.assert_close(torch.cat([prefilled, *rest], 1)[:1, padding:], expected[0])
    assert state.position.tolist() == [LENGTH, LENGTH + padding]


def test_rows_do_not_influence_one_another(model: TransformerLM):
    ids = tokens(3)
    torch.testing.assert_close(model(ids)[1:2], model(ids[1:2]))


def test_a_reloaded_model_computes_the_same(model: TransformerLM):
    other = TransformerLM(ModelConfig.from_dict(model.config.to_dict())).double()
    assert not torch.allclose(other(tokens()), model(tokens()))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()), model(tokens()))


@pytest.mark.parametrize("mechanism", ["polysketch-paper", "polysketch-heavy"])
@pytest.mark.parametrize(("depth", "activation"), [(1, "silu"), (2, "relu"), (3, "gelu")])
def test_a_reloaded_model_has_the_networks_of_its_sketch(mechanism: str, depth: int, activation: str):
    options = {**CHUNKED, "sketch_depth": depth, "sketch_activation": activation, "sketch_expansion": 3}
    model = build(attention=mechanism, attention_options=options)
    other = TransformerLM(ModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()), model(tokens()))
    for changed in ({"sketch_depth": 4}, {"sketch_activation": "silu" if activation == "relu" else "relu"}):
        another = build(attention=mechanism, attention_options={**options, **changed})
        if another.state_dict().keys() == model.state_dict().keys():
            another.load_state_dict(model.state_dict())
        assert not torch.allclose(another(tokens()), model(tokens()))


def test_the_loss_is_plain_cross_entropy_and_its_gradient_reaches_every_parameter(model: TransformerLM):
    ids = tokens()
    expected = torch.nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = model.loss(ids)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for (name, parameter), grad in zip(model.named_parameters(), expected_grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
        assert parameter.grad.abs().sum() > 0, name


def test_activation_checkpointing_gives_the_same_gradients_and_keeps_less(model: TransformerLM):
    ids, grads, kept = tokens(), [], []
    for setting in (False, True):
        model.activation_checkpointing = setting
        model.zero_grad()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            loss = model.loss(ids)
        loss.backward()
        kept.append(sum(sizes))
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert kept[1] < 0.5 * kept[0]


def test_training_lowers_the_loss_in_bfloat16_with_float32_weights(model: TransformerLM):
    model, ids = model.float(), tokens()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_calibrate_gives_every_layer_the_share_asked_for():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "num_layers": 3, "hidden_size": 16, "num_heads": 2}
    chosen = {"attention": "polysketch-paper", "attention_options": {**CHUNKED, "prefix_gain": (0.8, 0.3)}}
    model = TransformerLM(ModelConfig(**sizes, **chosen))
    before = model.prefix_shares(tokens())
    model.calibrate(tokens())
    shares = model.prefix_shares(tokens())
    assert list(shares) == [0, 1, 2]
    for layer, share in shares.items():
        assert (before[layer] - share).abs().max() > 0.05
        torch.testing.assert_close(share, torch.tensor([0.8, 0.3]), atol=1e-3, rtol=0)


def test_where_nothing_is_calibrated_nothing_is_computed(monkeypatch: pytest.MonkeyPatch):
    """Rows of a run may be longer than one process has room for."""
    for kind, is_computed in (("polysketch", False), ("polysketch-paper", True)):
        model, ran = build(kind), []
        monkeypatch.setattr(model.blocks[-1], "forward", lambda *_, ran=ran: ran.append(True))
        model.calibrate(tokens())
        assert bool(ran) == is_computed


def test_shares_are_reported_for_layers_with_a_prefix_only():
    assert build("softmax").prefix_shares(tokens()) == {}
    assert list(build("mixed").prefix_shares(tokens())) == [1]
    assert build("hybrid").prefix_shares(tokens()) == {}
    assert build(attention_options={"local_chunk": None}).prefix_shares(tokens()) == {}


def test_with_the_prefix_removed_nothing_is_seen_beyond_the_chunk():
    model, ids = build(num_layers=1), tokens()
    other = torch.cat([(ids[:, :8] + 1) % VOCAB, ids[:, 8:]], 1)
    assert (model(ids) - model(other))[:, 16:].abs().max() > 1e-3
    model.remove_prefix()
    torch.testing.assert_close(model(ids)[:, 8:], model(other)[:, 8:])
    with pytest.raises(ValueError, match="no layer has a sketched prefix to remove"):
        build("softmax").remove_prefix()


def test_ids_beyond_the_vocabulary_are_refused_in_the_last_column_too():
    model = build("softmax")
    ids = tokens()
    ids[0, -1] = model.config.vocab_size
    with pytest.raises(ValueError, match="was the text encoded with another tokenizer"):
        model.loss(ids)


def test_a_cloned_state_rolls_back_and_a_reordered_one_follows_its_rows(model: TransformerLM):
    ids, tail = tokens(), tokens(length=4, seed=3)
    _, state = model.extend(ids, model.init_state(2))
    kept = state.clone()
    expected, _ = model.extend(tail, state)
    assert kept.position.tolist() == [LENGTH] * 2
    assert kept.nbytes > 0
    indices = torch.tensor([1, 0, 1])
    found, _ = model.extend(tail[indices], kept.reorder(indices))
    torch.testing.assert_close(found, expected[indices])


def test_hidden_states_and_logits_are_the_two_halves_of_forward(model: TransformerLM):
    ids = tokens()
    assert torch.equal(model.logits(model.hidden_states(ids)), model(ids))
    hidden, _ = model.extend_hidden(ids, model.init_state(2))
    torch.testing.assert_close(hidden, model.hidden_states(ids))


def test_weights_start_as_documented():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=2000, num_layers=8, hidden_size=256, num_heads=4, attention="softmax")
    model = TransformerLM(config)
    block = model.blocks[3]
    expected = {
        model.embedding.weight: 256**-0.5,
        block.attention.query_key_value.weight: 256**-0.5,
        block.attention.output.weight: 256**-0.5 / 4,
        block.feedforward.gate_up.weight: 256**-0.5,
        block.feedforward.down.weight: config.feedforward_size**-0.5 / 4,
    }
    for weight, deviation in expected.items():
        assert weight.std().item() == pytest.approx(deviation, rel=0.03)
    assert model.output_bias.abs().max() == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, VOCAB]]), rf"in \[0, {VOCAB}\), got 0 to {VOCAB}; was the text encoded"),
        (torch.tensor([[-1, 0]]), "got -1 to 0"),
        (torch.tensor([0, 1]), r"must be int64 of shape \(batch, length\)"),
        (torch.tensor([[0.0, 1.0]]), "got torch.float32"),
    ],
)
def test_ids_that_are_no_tokens_are_refused(ids: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        build()(ids)


def test_a_state_of_another_batch_and_a_single_token_loss_are_refused():
    model = build()
    with pytest.raises(ValueError, match="the state holds 3 rows"):
        model.extend(tokens(), model.init_state(3))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        model.loss(tokens(length=1))


def test_the_model_is_its_parts_in_order(model: TransformerLM):
    ids, positions = tokens(), torch.arange(LENGTH)
    added = sinusoidal_positions(positions, 16) if model.config.input_positions else 0
    hidden = 4 * model.embedding(ids) + added
    for block, (name, _) in zip(model.blocks, model.config.layers(), strict=True):
        hidden = block(
            hidden, rotation_at(positions, 8, model.config.rope_base) if model.config.rotates(name) else None
        )
    normed = torch.nn.functional.layer_norm(hidden, (16,), model.final_norm.weight, model.final_norm.bias, 1e-5)
    torch.testing.assert_close(model(ids), normed @ model.embedding.weight.T + model.output_bias)


def test_only_the_named_mechanisms_are_rotated():
    assert [block.rotary for block in build("hybrid").blocks] == [False, False, True]
    assert [block.rotary for block in build("mixed", rotary=False).blocks] == [False, False]


def test_without_any_positions_only_the_order_of_earlier_tokens_is_lost():
    ids = tokens()
    other = torch.cat([ids[:, :20].flip(1), ids[:, 20:]], 1)
    blind = build("softmax", rotary=False, input_positions=False, num_layers=1)
    torch.testing.assert_close(blind(ids)[:, 20:], blind(other)[:, 20:])
    for seeing in ({"rotary": True, "input_positions": False}, {"rotary": False, "input_positions": True}):
        model = build("softmax", num_layers=1, **seeing)
        assert (model(ids) - model(other))[:, 20:].abs().max() > 1e-3


def test_positions_do_not_drown_the_embedded_tokens():
    ids, positions = tokens(), torch.arange(LENGTH)
    model = build("softmax", hidden_size=128)
    embedded, _ = model._embed(ids, positions)
    added = sinusoidal_positions(positions, 128)
    assert (embedded - added).norm() > added.norm()


# A mechanism alone compiles in tests/attention; here all that a model puts around one does.
@pytest.mark.parametrize("name", first_always(["around", *sorted(CAUSAL)]))
def test_a_training_step_compiles_as_one_graph_and_gives_the_same(name: str):
    torch.compiler.reset()
    model, ids = build(name, num_layers=1), tokens()
    expected = model.loss(ids)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = torch.compile(model.loss, backend="aot_eager", fullgraph=True)(ids)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(one, other)
