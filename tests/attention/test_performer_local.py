"""Performer attention with exact local chunks: its formula, its limits, its share, and its decoding."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from polysketch import attention

HEADS, KV_HEADS, CHUNK, LENGTH = 4, 2, 8, 37


def build(head_dim: int = 16, **options) -> attention.Mechanism:
    options = {"seed": 0, "num_features": 32, "local_chunk": CHUNK, **options}
    return attention.build("performer", num_heads=HEADS, head_dim=head_dim, num_kv_heads=KV_HEADS, **options)


def inputs(scale: float = 1.0, dtype: torch.dtype = torch.float64, *, head_dim: int = 16, length: int = LENGTH):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, length, head_dim), (KV_HEADS, length, head_dim), (KV_HEADS, length, head_dim))
    query, key, value = (torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [(scale * query).to(dtype), (scale * key).to(dtype), value.to(dtype)]


def weights(mechanism: attention.Mechanism, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Exact weights in chunks, estimates without any constant but the query's elsewhere, all on the scale of exp."""
    query, key = query.double() * query.shape[-1] ** -0.25, key.double() * key.shape[-1] ** -0.25
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    random = mechanism.feature_map.weight.double()
    query_exponent = query @ random.T - query.square().sum(-1, keepdim=True) / 2
    key_exponent = key @ random.T - key.square().sum(-1, keepdim=True) / 2
    largest = query_exponent.amax(-1, keepdim=True)
    query_features = ((query_exponent - largest).exp() + 1e-6) * largest.exp()
    estimated = query_features @ (key_exponent.exp() + 1e-6).mT / len(random)
    chunk = torch.arange(query.shape[2]) // mechanism.local_chunk
    same = chunk[:, None] == chunk
    return torch.where(same, (query @ key.mT).exp(), 0.0), torch.where(same, 0.0, estimated)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_it_is_its_formula_one_numerator_and_one_denominator(head_dim: int, causal: bool):
    mechanism, (query, key, value) = build(head_dim).double(), inputs(head_dim=head_dim)
    assert bool(mechanism.feature_map.key_constant > 0) == (head_dim == 128)  # a constant to give back, or none
    exact, estimated = weights(mechanism, query, key)
    both = exact + estimated
    both = both.tril() if causal else both
    expected = both @ value.repeat_interleave(2, 1) / both.sum(-1, keepdim=True)
    torch.testing.assert_close(mechanism(query, key, value, causal=causal), expected, rtol=1e-6, atol=1e-8)
    exact_share = (exact.tril().sum(-1) / (exact + estimated).tril().sum(-1))[:, :, CHUNK:].mean()
    if head_dim == 16:
        assert 0.2 < exact_share < 0.8  # both parts count


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, 8])
def test_in_one_chunk_it_is_softmax_attention_whatever_its_features(length: int, causal: bool):
    mechanism, (query, key, value) = build(num_features=1).double(), inputs(2.0, length=length)
    expected = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(mechanism(query, key, value, causal=causal), expected, rtol=1e-10, atol=1e-10)


def test_it_is_nearer_to_softmax_attention_than_estimates_everywhere_and_gets_nearer_with_more_features():
    query, key, value = inputs(0.4)
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def error(num_features: int, local_chunk: int | None) -> float:
        found = [
            build(num_features=num_features, local_chunk=local_chunk, seed=seed).double()(query, key, value)
            for seed in range(8)
        ]
        return sum(float((one - exact).norm()) for one in found) / len(found)

    few, many, everywhere = error(64, CHUNK), error(1024, CHUNK), error(64, None)
    assert few < 0.8 * everywhere
    assert 3 < few / many < 5.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("head_dim", [16, 256])
def test_outputs_stay_within_the_values_in_every_dtype_at_any_norm(head_dim: int, scale: float, dtype: torch.dtype):
    mechanism, (query, key, value) = build(head_dim), inputs(1.0, dtype, head_dim=head_dim)
    query, key = scale * query, scale * key
    decoded, _ = mechanism.extend(query, key, value, mechanism.init_state(2))
    for found in (mechanism(query, key, value), decoded):
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert found.abs().max() <= 1.01 * value.abs().max()


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_loud_key_to_come_changes_nothing_before_it(scale: float):
    mechanism, (query, key, value) = build().double(), inputs(scale)
    louder = torch.cat([key[:, :, :10], 5 * key[:, :, 10:]], 2)
    before, after = mechanism(query, key, value), mechanism(query, louder, value)
    torch.testing.assert_close(after[:, :, :10], before[:, :, :10], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[:, :, 10:], before[:, :, 10:])


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [8, 1, 7, 1, 20], [3, 3, 3, 28], [5, 4, 28]])
def test_decoding_with_masked_tokens_in_the_open_chunk_is_the_forward(sizes: list[int]):
    """A masked key is kept as zeros, whose score of 0 would be a weight of 1."""
    mechanism, (query, key, value) = build().double(), inputs()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :3] = mask[0, 9:12] = mask[1, 17:18] = False
    state, outputs, start = mechanism.init_state(2), [], 0
    for size in sizes:
        span = slice(start, start + size)
        output, state = mechanism.extend(*(x[:, :, span] for x in (query, key, value)), state, key_mask=mask[:, span])
        outputs.append(output)
        start += size
    expected, found = mechanism(query, key, value, key_mask=mask), torch.cat(outputs, 2)
    torch.testing.assert_close(found[0, :, 3:], expected[0, :, 3:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-10)


def test_the_state_neither_grows_nor_moves():
    mechanism, (query, key, value) = build().double(), inputs()
    state = mechanism.init_state(2)
    addresses, nbytes = {name: x.data_ptr() for name, x in state.tensors().items()}, state.nbytes
    for span in (slice(0, 21), slice(21, 22), slice(22, 30)):
        _, returned = mechanism.extend(query[:, :, span], key[:, :, span], value[:, :, span], state)
        assert returned is state
    assert {name: x.data_ptr() for name, x in state.tensors().items()} == addresses
    assert state.nbytes == nbytes


def test_the_share_is_the_mean_of_each_rows_estimated_weight_over_its_weight():
    mechanism, (query, key, _) = build().double(), inputs()
    exact, estimated = (x.tril().sum(-1) for x in weights(mechanism, query, key))
    expected = (estimated / (estimated + exact))[:, :, CHUNK:].mean((0, 2))
    torch.testing.assert_close(mechanism.prefix_share(query, key), expected, rtol=1e-6, atol=1e-8)
    mask = torch.ones(2, LENGTH + 7, dtype=torch.bool)
    mask[:, :7] = False
    padded = (pad(x, (0, 0, 7, 0), value=3.0) for x in (query, key))
    torch.testing.assert_close(mechanism.prefix_share(*padded, key_mask=mask), expected, rtol=1e-6, atol=1e-8)


def test_a_sequence_of_one_chunk_has_a_share_of_zero():
    query, key, _ = inputs(length=CHUNK)
    assert torch.equal(build().double().prefix_share(query, key), torch.zeros(HEADS, dtype=torch.float64))


def test_with_the_prefix_removed_a_chunk_sees_only_itself():
    mechanism, (query, key, value) = build().double(), inputs()
    whole, last = mechanism(query, key, value), slice(32, LENGTH)
    mechanism.remove_prefix()
    alone = mechanism(query[:, :, last], key[:, :, last], value[:, :, last])
    torch.testing.assert_close(mechanism(query, key, value)[:, :, last], alone)
    assert (whole[:, :, last] - alone).abs().max() > 0.1
    assert torch.equal(mechanism.prefix_share(query, key), torch.zeros(HEADS, dtype=torch.float64))
    assert "prefix removed" in repr(mechanism)


def test_without_a_local_part_there_is_no_prefix_to_measure_or_remove():
    mechanism, (query, key, _) = build(local_chunk=None).double(), inputs()
    assert not mechanism.has_prefix
    with pytest.raises(ValueError, match="local_chunk=None"):
        mechanism.prefix_share(query, key)
    with pytest.raises(ValueError, match="local_chunk=None"):
        mechanism.remove_prefix()


def test_local_chunks_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="local_chunk needs kind='softmax', whose exact weights are known"):
        build(kind="relu")
    with pytest.raises(ValueError, match="local_chunk must be at least 1, got 0"):
        build(local_chunk=0)
    with pytest.raises(TypeError, match=r"local_chunk must be an integer, got 8\.0"):
        build(local_chunk=8.0)
    with pytest.raises(ValueError, match="features of kind 'relu' have no constants"):
        build(kind="relu", local_chunk=None).feature_map.log_scale(inputs()[0].float())
