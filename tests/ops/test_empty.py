"""A batch without rows gives outputs without rows; a sequence without tokens is refused, where tokens attend."""

import pytest
import torch

from polysketch import ops
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.learned_sketch import learned_sketch
from polysketch.ops.native import why_unavailable

BACKENDS = ["reference", "chunked", *([] if why_unavailable() else ["native"])]
LOCAL = {"none": None, "chunks of 4": 4}


def linear(x, *, backend="auto", chunk=None, **options):
    local = None if chunk is None else ops.LocalPolynomial(x, x, 4, chunk)
    return ops.linear_attention(x, x, x, power=2, local=local, backend=backend, **options)


ATTENTION = {
    "polynomial, reference": lambda x: ops.polynomial_attention(x, x, x, causal=True, backend="reference"),
    "polynomial, blockwise": lambda x: ops.polynomial_attention(x, x, x, causal=True, backend="blockwise"),
    "squared": lambda x: ops.squared_polynomial_attention(x, x, x, coefficients=torch.ones(3), causal=True),
    "softmax": lambda x: ops.softmax_attention(x, x, x, causal=True),
    "sliding window, blockwise": lambda x: ops.sliding_window_attention(x, x, x, window=4, backend="blockwise"),
    "sliding window": lambda x: ops.sliding_window_attention(x, x, x, window=4),
    "local": lambda x: ops.local_attention(x, x, x, chunk=4),
    "local, causal": lambda x: ops.local_attention(x, x, x, chunk=4, causal=True),
    "hyper": lambda x: ops.hyper_attention(
        x, x, x, hyperplanes=torch.randn(16, 3), causal=True, chunk_size=2, sample_size=2, min_length=2, backend="plain"
    ),
    "nystrom": lambda x: ops.nystrom_attention(x, x, x, num_landmarks=2),
} | {
    f"linear, {backend}, local {local}, causal {causal}": (
        lambda x, b=backend, c=chunk, a=causal: linear(x, backend=b, chunk=c, causal=a).output
    )
    for backend in BACKENDS
    for local, chunk in LOCAL.items()
    for causal in (True, False)
}


@pytest.mark.parametrize("attend", ATTENTION.values(), ids=ATTENTION)
def test_no_rows_give_no_rows_and_a_gradient(attend):
    x = torch.randn(0, 2, 9, 16, requires_grad=True)
    output = attend(x)
    assert output.shape == (0, 2, 9, 16)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("attend", ATTENTION.values(), ids=ATTENTION)
def test_no_tokens_are_refused(attend):
    with pytest.raises(ValueError, match=r"at least one position|only the batch may be 0"):
        attend(torch.randn(2, 2, 0, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_of_no_rows_are_made_and_go_on(backend):
    x = torch.randn(0, 2, 9, 16)
    state = linear(x, backend=backend, chunk=4, causal=True, return_state=True).state
    assert state.sums.shape[0] == state.position.shape[0] == 0
    assert linear(x, backend=backend, chunk=4, causal=True, state=state, return_state=True).state.open_key.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_decoding_no_rows_gives_no_rows(tokens, dtype):
    x = torch.randn(0, 2, tokens, 16, dtype=dtype)
    state = ops.LinearAttentionState.init(0, 2, 16, 16, power=2, local_chunk=4, local_dim=16, dtype=dtype)
    local = ops.LocalPolynomial(x, x, 4, 4)
    assert ops.linear_attention_extend_(x, x, x, state, power=2, local=local).output.shape == x.shape


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 6), (2, 2, 0, 6)], ids=str)
def test_the_learned_sketch_maps_no_vectors_to_none(backend, shape):
    sketch, x = LearnedSketch(6, sketch_size=4, num_kv_heads=2), torch.randn(shape, requires_grad=True)
    weights = [weight for network in sketch.networks for weight in network.weights()]
    features = learned_sketch(x, weights, 2, backend=backend)
    assert features.shape == (*shape[:3], 4)
    features.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert all(weight.grad is None or not weight.grad.any() for weight in weights)
