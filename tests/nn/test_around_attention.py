"""What may stand around a mechanism: convolved projections, the norm of queries and keys, gates on the heads."""

import pytest
import torch
from torch import Tensor, nn

from polysketch import attention
from polysketch.models import ModelConfig, TransformerLM
from polysketch.nn import (
    HeadGate,
    ProjectionConvolution,
    ProjectionConvolutionState,
    QueryKeyNorm,
    SelfAttention,
    ShortConvolution,
    build_mixer,
    rotation_at,
)

BATCH, LENGTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TAPS = 2, 13, 12, 4, 2, 6, 4
ALL = {"projection_convolution": TAPS, "query_key_norm": True, "head_gate": True}
NEUTRAL = {**ALL, "projection_convolution": 1}  # what starts as the identity
MECHANISMS = {
    "softmax": ("softmax", {}),
    "polysketch-paper": ("polysketch-paper", {"sketch_size": 6, "local_chunk": 4}),
    "decaying": ("polysketch-paper", {"sketch_size": 6, "local_chunk": 4, "decay_gate": True}),
    "random": ("polysketch-paper", {"sketch_size": 6, "local_chunk": None, "learned": False}),
}


def layer(kind: str = "softmax", **around) -> SelfAttention:
    """A layer whose every parameter is away from its start."""
    torch.manual_seed(0)
    name, options = MECHANISMS[kind]
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": HEAD_DIM, "num_kv_heads": KV_HEADS}
    made = build_mixer(name, options, **sizes, **(around or ALL)).double()
    for parameter in made.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return made


def tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, HIDDEN, generator=generator, dtype=torch.float64)


def model(kind: str, **around) -> TransformerLM:
    torch.manual_seed(0)
    name, options = MECHANISMS[kind]
    sizes = {"vocab_size": 19, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    return TransformerLM(ModelConfig(**sizes, attention=name, attention_options=options, **around)).double()


def ids() -> Tensor:
    return torch.randint(19, (2, 21), generator=torch.Generator().manual_seed(3))


def extended(mixer: SelfAttention, x: Tensor, sizes: list[int], spoil=lambda state: None) -> Tensor:
    """`extend` over a split; `spoil` is given the state after every part."""
    state, outputs = mixer.init_state(BATCH, dtype=torch.float64), []
    for part in x.split(sizes, dim=1):
        start = int(state.position[0])
        output, returned = mixer.extend(part, state, rotation_at(torch.arange(start, start + part.shape[1]), HEAD_DIM))
        assert returned is state
        outputs.append(output)
        spoil(state)
    return torch.cat(outputs, 1)


def test_projections_are_convolved_then_normed_then_rotated():
    """Token by token and channel by channel."""
    mixer, x = layer(), tokens()
    projected, filters = mixer.query_key_value(x), mixer.convolution.filter[0]
    convolved = torch.zeros_like(projected)
    for position in range(LENGTH):
        for back in range(min(TAPS, position + 1)):
            convolved[:, position] += projected[:, position - back] * filters[:, TAPS - 1 - back]
    heads = convolved.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    matched = heads[:, : HEADS + KV_HEADS]
    lengths = (matched.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    matched = matched / lengths * mixer.query_key_norm.scale.view(-1, 1, HEAD_DIM)
    query, key, value, _ = mixer.project(x)
    torch.testing.assert_close(torch.cat([query, key], 1), matched)
    torch.testing.assert_close(value, heads[:, HEADS + KV_HEADS :])
    rotated = mixer.project(x, rotation_at(torch.arange(LENGTH), HEAD_DIM))
    torch.testing.assert_close(rotated[0].norm(dim=-1), query.norm(dim=-1))
    assert not torch.allclose(rotated[1], key)


def test_a_mechanism_that_reads_heads_before_their_rotation_is_given_them_after_the_norm():
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": HEAD_DIM}
    mixer, x = build_mixer("polysketch", {}, **sizes, **ALL).double(), tokens()
    plain, rotated = mixer.project(x), mixer.project(x, rotation_at(torch.arange(LENGTH), HEAD_DIM))
    for each, found, turned in zip(plain[:2], rotated.given["unrotated"], rotated[:2], strict=True):
        assert torch.equal(found, each)
        assert not torch.allclose(turned, each)
    assert "unrotated" not in layer("softmax").project(x).given


def test_every_head_is_gated_by_the_layers_input_before_the_output_projection():
    mixer, x = layer(head_gate=True), tokens()
    query, key, value, _ = mixer.project(x)
    attended = mixer.mechanism(query, key, value)
    for head in range(HEADS):
        logits = x @ mixer.head_gate.weight[head] + mixer.head_gate.bias[head]
        attended[:, head] *= 2 / (1 + torch.exp(-logits))[..., None]
    torch.testing.assert_close(mixer(x), attended.transpose(1, 2).flatten(2) @ mixer.output.weight.T)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_norm_gates_and_a_convolution_of_one_tap_start_as_the_identity(kind: str):
    """And from the same random numbers: the weights that models with more around them have too are equal."""
    normed, plain = model(kind, query_key_norm=True), model(kind)
    gated = model(kind, **NEUTRAL)
    torch.testing.assert_close(gated(ids()), normed(ids()))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, gated.get_parameter(name)), name
    assert len(list(gated.parameters())) == len(list(plain.parameters())) + 2 * 4


def test_with_a_convolution_keys_start_as_queries_of_the_token_before_in_every_second_head():
    torch.manual_seed(0)
    around = {"projection_convolution": TAPS, "query_key_norm": True}
    sizes = {"hidden_size": HIDDEN, "num_heads": 6, "head_dim": HEAD_DIM, "num_kv_heads": 3}
    mixer = build_mixer("softmax", {}, **sizes, **around).double()
    query, key, _, _ = mixer.project(tokens())
    assert len(set(query[0, :, 0, 0].tolist())) == 6
    for head in (0, 2):
        torch.testing.assert_close(key[:, head, 1:], query[:, 2 * head, :-1])
        assert not key[:, head, 0].any()  # before the first token there is none
    torch.testing.assert_close(key[:, 1], query[:, 2])


@pytest.mark.parametrize(
    ("pattern", "of_layers"),
    [
        (("polysketch",), [(True, False)] * 2),
        (("sliding-window", "polysketch"), [(True, False), (True, True)]),
        (("sliding-window", "softmax"), [(True, False)] * 2),
        (("polysketch", "softmax"), [(True, False)] * 2),
    ],
)
def test_beside_layers_of_windows_all_heads_of_polysketch_start_with_induction(pattern, of_layers):
    """Its sums serve heads that ask what followed a token, and windows find what is near."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "num_layers": 2, "hidden_size": HIDDEN, "num_heads": 2, "head_dim": HEAD_DIM}
    lm = TransformerLM(ModelConfig(**sizes, attention=pattern, projection_convolution=TAPS)).double()
    for block, expected in zip(lm.blocks, of_layers, strict=True):
        query, key, _, _ = block.attention.project(tokens())
        for head, before in enumerate(expected):
            assert torch.allclose(key[:, head, 1:], query[:, head, :-1]) == before
            assert torch.allclose(key[:, head], query[:, head]) != before


@pytest.mark.parametrize("name", ["softmax", "polysketch"])
def test_a_fresh_layer_with_a_convolution_finds_what_followed_the_same_token(name: str):
    """Induction: of 60 tokens the last repeats an earlier one, whose successor has the largest weight in head 0."""
    torch.manual_seed(0)
    options = {} if name == "softmax" else {"window": 8}
    mixer = build_mixer(
        name, options, hidden_size=128, num_heads=2, head_dim=64, projection_convolution=TAPS, query_key_norm=True
    )
    x, earlier = torch.randn(1, 60, 128), 17
    x[:, -1] = x[:, earlier]
    query, key, _, given = mixer.project(x)
    which = torch.eye(64)[None, None, :60].expand(1, 2, 60, 64)  # the output tells the weight of every token
    weights = mixer.mechanism(query, key, which, **given)[0, 0, -1, :60]
    assert int(weights[: 60 - 8].argmax()) == earlier + 1


@pytest.mark.parametrize("kind", MECHANISMS)
def test_models_of_one_seed_differ_in_their_mechanism_alone(kind: str):
    """So forms of attention can be compared from the same start."""
    plain, other = model("softmax"), model(kind)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["polysketch-paper", "decaying", "random"])
def test_of_mechanisms_that_norm_themselves_the_fresh_model_is_the_plain_one(kind: str):
    """A layer norm has no use for the length of a vector, but for what is added under its root."""
    torch.testing.assert_close(model(kind, **NEUTRAL)(ids()), model(kind)(ids()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_gradients_reach_every_parameter_of_a_fresh_model(kind: str):
    fresh = model(kind, **ALL)
    fresh.loss(ids()).backward()
    for name, parameter in fresh.named_parameters():
        assert float(parameter.grad.abs().max()) > 0, name
        if "head_gate" in name or "scale" in name:  # every head's own, not the same for all
            assert parameter.grad.flatten().unique().numel() == parameter.numel(), name


@pytest.mark.parametrize("kind", MECHANISMS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [4, 1, 1, 7], [2, 11], [LENGTH]])
def test_forward_equals_extend_over_a_split(kind: str, sizes: list[int]):
    mixer, x = layer(kind), tokens()
    torch.testing.assert_close(extended(mixer, x, sizes), mixer(x, rotation_at(torch.arange(LENGTH), HEAD_DIM)))


@pytest.mark.parametrize("kind", MECHANISMS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.tail.zero_(),
        lambda state: state.tail.copy_(state.tail.roll(1, 2)),
        lambda state: state.tail.copy_(state.tail.flip(0)),
    ],
    ids=["not carried", "one token late", "rows exchanged"],
)
def test_a_spoiled_tail_is_seen(kind: str, spoil):
    """The comparison of forward and extend would fail."""
    mixer, x = layer(kind), tokens()
    expected = mixer(x, rotation_at(torch.arange(LENGTH), HEAD_DIM))
    assert float((extended(mixer, x, [5, 8], spoil) - expected)[:, 5:].detach().abs().max()) > 1e-2


@pytest.mark.parametrize("kind", MECHANISMS)
def test_padding_before_a_row_changes_nothing_whatever_it_holds(kind: str):
    """Rows start at different places, and their convolutions with them; decoding goes on from there."""
    mixer, padding = layer(kind), (3, 0)
    rows = [tokens()[row, : LENGTH - 3 + 3 * row] for row in range(BATCH)]
    padded = torch.full((BATCH, LENGTH, HIDDEN), float("nan"), dtype=torch.float64)
    padded[0, :3] = 50.0  # a NaN in a query of padding is that query's own business
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    for row, real in enumerate(rows):
        padded[row, padding[row] :], mask[row, : padding[row]] = real, False
    expected = [mixer(real[None])[0] for real in rows]
    found = mixer(padded, key_mask=mask)
    first, state = mixer.extend(padded[:, :5], mixer.init_state(BATCH, dtype=torch.float64), key_mask=mask[:, :5])
    assert state.position.tolist() == [2, 5]
    second, state = mixer.extend(padded[:, 5:7], state)
    last, state = mixer.extend(padded[:, 7:], state)
    for row in range(BATCH):
        torch.testing.assert_close(found[row, padding[row] :], expected[row])
        torch.testing.assert_close(torch.cat([first, second, last], 1)[row, padding[row] :], expected[row])


def test_there_is_a_state_of_its_own_only_where_there_is_a_convolution():
    plain, convolved = layer("random", head_gate=True, query_key_norm=True), layer("random")
    inner, state = plain.init_state(BATCH), convolved.init_state(BATCH)
    assert type(inner) is not ProjectionConvolutionState
    assert type(state) is ProjectionConvolutionState
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    assert state.tail.shape == (BATCH, 1, TAPS - 1, width)
    assert state.nbytes == inner.nbytes + BATCH * (TAPS - 1) * width * 8
    assert convolved.init_state(BATCH, dtype=torch.float32).tail.dtype == torch.float32
    address = state.tail.data_ptr()
    _, state = convolved.extend(tokens(), state)
    assert state.nbytes == convolved.init_state(BATCH).nbytes
    assert (state.tail.data_ptr(), state.position.tolist()) == (address, [LENGTH] * BATCH)
    assert not state.tail.requires_grad


def test_a_state_is_cloned_reordered_and_reset():
    mixer, x, more = layer("random"), tokens(), tokens(2, seed=3)
    _, state = mixer.extend(x, mixer.init_state(BATCH))
    kept = state.clone()
    expected, _ = mixer.extend(more, state)
    indices = torch.tensor([1, 0, 1])
    found, reordered = mixer.extend(more[indices], kept.reorder(indices))
    torch.testing.assert_close(found, expected[indices])
    assert reordered.position.tolist() == [LENGTH + 2] * 3
    assert kept.position.tolist() == [LENGTH] * BATCH
    address = state.tail.data_ptr()
    state.reset_()
    assert state.tail.data_ptr() == address
    torch.testing.assert_close(mixer.extend(more, state)[0], mixer(more))


def test_a_convolution_is_causal_only_and_the_others_look_both_ways():
    with pytest.raises(ValueError, match="projection_convolution is causal only"):
        layer(projection_convolution=2)(tokens(), causal=False)
    x = tokens()
    assert layer(query_key_norm=True, head_gate=True)(x, causal=False).isfinite().all()


def test_under_autocast_it_is_close_and_its_state_stays_float32():
    mixer, x = layer("polysketch-paper").float(), tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = mixer(x)
        decoded, state = mixer.extend(x, mixer.init_state(BATCH))
    assert state.tail.dtype == torch.float32
    for output in (found, decoded):
        assert 0 < (output - mixer(x)).norm() < 0.05 * mixer(x).norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_long_vectors_in_half_precision_is_taken_in_float32(dtype: torch.dtype):
    """The square of 1000 is no number of float16."""
    x = (1000 * torch.randn(1, HEADS, 3, HEAD_DIM)).to(dtype)
    found = QueryKeyNorm(HEADS, HEAD_DIM).to(dtype)(x)
    assert found.dtype == dtype
    expected = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def test_the_norms_factors_have_one_axis_as_gains_that_do_not_decay():
    assert [parameter.ndim for parameter in QueryKeyNorm(HEADS, HEAD_DIM).parameters()] == [1]


def test_parts_have_the_parameters_of_their_sizes():
    def count(part: nn.Module) -> int:
        return sum(parameter.numel() for parameter in part.parameters())

    assert count(ProjectionConvolution(24, 4)) == 24 * 4
    assert count(QueryKeyNorm(6, 8)) == 48
    assert count(HeadGate(HIDDEN, HEADS)) == HEADS * (HIDDEN + 1)
    mixer = layer()
    assert repr(mixer.convolution) == "ProjectionConvolution(width=48, size=4)"
    assert repr(mixer.head_gate) == "HeadGate(num_heads=4, hidden_size=12)"


def test_nothing_stands_around_a_layer_without_attention():
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": HEAD_DIM}
    made = build_mixer("short-convolution", {}, **sizes, **ALL)
    assert type(made) is ShortConvolution
    assert not any(isinstance(part, ProjectionConvolution | QueryKeyNorm | HeadGate) for part in made.modules())


@pytest.mark.parametrize("name", [name for name, kind in attention.MECHANISMS.items() if kind.is_causal])
def test_every_mechanism_takes_all_of_them(name: str):
    """Forward equals decoding token by token."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": HEAD_DIM}
    mixer, x = build_mixer(name, {}, **sizes, **ALL).double(), tokens()
    nn.init.normal_(mixer.convolution.filter)
    torch.testing.assert_close(extended(mixer, x, [1] * LENGTH), mixer(x, rotation_at(torch.arange(LENGTH), HEAD_DIM)))
