"""One rule for mechanisms and models: no rows or no tokens give an output without entries, and leave a state alone."""

import copy

import pytest
import torch

from polysketch.attention import MECHANISMS, Mechanism, build
from polysketch.models import EncoderConfig, ModelConfig, TransformerEncoder, TransformerLM

HEADS, HEAD_DIM, WIDTH = 2, 8, 16
SHAPES = [(0, 9), (2, 0), (0, 0)]
NAMES = sorted(MECHANISMS)
CAUSAL = sorted(name for name, kind in MECHANISMS.items() if kind.is_causal)


def mechanism(name: str) -> Mechanism:
    torch.manual_seed(0)
    return build(name, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=1)


def inputs(rows: int, tokens: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    tensors = [torch.randn(rows, heads, tokens, HEAD_DIM, requires_grad=True) for heads in (HEADS, 1, 1)]
    return tensors, {"hidden": torch.randn(rows, tokens, WIDTH)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_nothing_and_a_gradient(name, shape):
    """In both directions, where the mechanism has both; with a mask, too."""
    layer = mechanism(name)
    for causal in (True, False):
        if not (layer.is_causal if causal else layer.is_bidirectional):
            continue
        for mask in (None, torch.ones(shape, dtype=torch.bool)):
            tensors, given = inputs(*shape)
            output = layer(*tensors, causal=causal, key_mask=mask, **given)
            assert output.shape == (shape[0], HEADS, shape[1], HEAD_DIM)
            assert output.dtype == torch.float32
            output.sum().backward()
            assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in tensors)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_new_token_leaves_a_state_as_it_is(name):
    """What follows is bit for bit the same."""
    layer = mechanism(name)
    state = layer.init_state(2, "cpu", torch.float32)
    tensors, given = inputs(2, 5)
    _, state = layer.extend(*tensors, state, **given)
    other = state.clone()
    nothing, none = inputs(2, 0)
    output, state = layer.extend(*nothing, state, **none)
    assert output.shape == (2, HEADS, 0, HEAD_DIM)
    assert not output.requires_grad
    tensors, given = inputs(2, 3)
    found, expected = (layer.extend(*tensors, each, **given)[0] for each in (state, other))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_span_of_nothing_leaves_a_state_as_it_is(name):
    layer = mechanism(name)
    try:
        state = layer.init_span(2)
    except NotImplementedError:
        pytest.skip("it has no spans")
    tensors, given = inputs(2, 5)
    _, state = layer.forward_span(*tensors, state, **given)
    nothing, none = inputs(2, 0)
    output, after = layer.forward_span(*nothing, state, **none)
    assert output.shape == (2, HEADS, 0, HEAD_DIM)
    assert after.position == 5
    assert all(torch.equal(tensor, state.tensors[name]) for name, tensor in after.tensors.items())
    output.sum().backward()
    assert all(tensor.grad is not None for tensor in nothing)


@pytest.mark.parametrize("name", ["softmax", "polysketch-paper", "linear"])
def test_shapes_that_do_not_fit_are_refused_as_ever(name):
    layer, (query, key, value) = mechanism(name), inputs(2, 0)[0]
    with pytest.raises(ValueError, match="key must be"):
        layer(query, key.expand(2, HEADS, 0, HEAD_DIM), value)
    with pytest.raises(TypeError, match="share one dtype"):
        layer(query, key.double(), value)


def test_a_users_mechanism_has_it_too():
    """Its own forward is not called, where it would divide by the number of tokens."""

    class Mean(Mechanism):
        def forward(self, query, key, value, *, causal=True, block_size=None, key_mask=None, hidden=None):
            return value.sum(2, keepdim=True).expand_as(query) * (1 // query.shape[2])

    tensors, _ = inputs(2, 0)
    assert Mean(HEADS, HEAD_DIM, 1)(*tensors).shape == (2, HEADS, 0, HEAD_DIM)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("attention", ["polysketch", "softmax", ("based", "short-convolution")], ids=str)
def test_models_give_no_logits_of_no_tokens(attention, shape):
    """In one pass, and by a state that goes on as if nothing had been asked."""
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(31, 2, hidden_size=WIDTH, num_heads=HEADS, attention=attention)).eval()
    nothing = torch.zeros(shape, dtype=torch.int64)
    assert model(nothing).shape == (*shape, 31)
    if shape[0] == 0:
        return
    ids = torch.randint(0, 31, (shape[0], 7))
    _, state = model.extend(ids, model.init_state(shape[0]))
    other = copy.deepcopy(state)
    logits, state = model.extend(nothing, state)
    assert logits.shape == (*shape, 31)
    found, expected = (model.extend(ids, each)[0] for each in (state, other))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoders_give_no_vectors_of_no_tokens(shape):
    encoder = TransformerEncoder(EncoderConfig(31, 2, hidden_size=WIDTH, num_heads=HEADS, attention="linear"))
    assert encoder(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, WIDTH)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loss_of_nothing_is_refused(shape):
    """There is no mean of it."""
    model = TransformerLM(ModelConfig(31, 1, hidden_size=WIDTH, num_heads=HEADS))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        model.loss(torch.zeros(shape, dtype=torch.int64))
