"""The sketched prefix of polysketch: its gain, its share of the mass, and its removal."""

import pytest
import torch

from attention.cases import HEAD_DIM, HEADS, HIDDEN, polysketch
from polysketch import attention


def build(**options) -> attention.Mechanism:
    torch.manual_seed(0)
    options = {"sketch_size": 8, "local_chunk": 8, **options}
    return attention.build("polysketch-paper", num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=2, **options)


def inputs(length: int = 40, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, length, HEAD_DIM, generator=generator) for heads in (HEADS, 2))


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_calibrate_gives_the_prefix_the_share_asked_for(learned: bool, share: float):
    mechanism, (query, key) = build(learned=learned, prefix_gain=share), inputs()
    before = mechanism.prefix_share(query, key)
    mechanism.calibrate(query, key)
    after = mechanism.prefix_share(query, key).view(2, -1).mean(1)  # over the query heads of a key/value head
    assert (before - share).abs().max() > 0.003
    torch.testing.assert_close(after, torch.full((2,), share), atol=1e-4, rtol=1e-4)


def test_heads_may_ask_for_different_shares():
    mechanism, (query, key) = build(prefix_gain=(0.95, 0.1)), inputs()
    mechanism.calibrate(query, key)
    after = mechanism.prefix_share(query, key).view(2, -1).mean(1)
    torch.testing.assert_close(after, torch.tensor([0.95, 0.1]), atol=1e-4, rtol=1e-4)


def test_the_share_is_the_mean_of_each_rows_sketched_weight_over_its_weight():
    mechanism, (query, key) = build(prefix_gain=0.6), inputs()
    mechanism.calibrate(query, key)
    features = mechanism.feature_map.map_queries(query), mechanism.feature_map.map_keys(key).repeat_interleave(2, 1)
    gain = mechanism.prefix_gain.log_gain.exp().repeat_interleave(2)[:, None, None]
    sketched = gain * (features[0] @ features[1].mT) ** 2
    exact = (mechanism.query_norm(query) @ mechanism.key_norm(key).repeat_interleave(2, 1).mT) ** 4
    chunk = torch.arange(40) // 8
    same = chunk[:, None] == chunk
    prefix, local = (sketched * ~same).tril().sum(-1), (exact * same).tril().sum(-1)
    expected = (prefix / (prefix + local))[:, :, 8:].mean((0, 2))
    torch.testing.assert_close(mechanism.prefix_share(query, key), expected, rtol=1e-4, atol=1e-5)


def test_padding_does_not_count_in_the_share():
    mechanism, (query, key) = build(prefix_gain=0.6), inputs()
    mechanism.calibrate(query, key)
    mask = torch.ones(2, 47, dtype=torch.bool)
    mask[:, :7] = False
    padded = [torch.nn.functional.pad(x, (0, 0, 7, 0), value=3.0) for x in (query, key)]
    expected = mechanism.prefix_share(query, key)
    torch.testing.assert_close(mechanism.prefix_share(*padded, key_mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_without_prefix_gain_calibrate_leaves_the_papers_scale():
    mechanism, (query, key) = build(), inputs()
    before = mechanism.prefix_share(query, key)
    mechanism.calibrate(query, key)
    assert torch.equal(mechanism.prefix_share(query, key), before)
    assert not any("gain" in name for name, _ in mechanism.named_parameters())


def test_a_sequence_of_one_chunk_has_nothing_to_calibrate_and_a_share_of_zero():
    mechanism, (query, key) = build(prefix_gain=0.9), inputs(length=8)
    mechanism.calibrate(query, key)
    assert torch.equal(mechanism.prefix_gain.log_gain, torch.zeros(2))
    assert torch.equal(mechanism.prefix_share(query, key), torch.zeros(HEADS))


def test_gated_heads_spread_their_gains_the_fastest_strongest():
    mechanism, (query, key) = build(prefix_gain=0.9, decay_gate=True, hidden_size=HIDDEN), inputs()
    torch.testing.assert_close(mechanism.prefix_gain.log_gain.detach(), torch.tensor([0.0, -9.0]))
    hidden = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(3))
    mechanism.calibrate(query, key, hidden=hidden)
    odds = mechanism.prefix_share(query, key, hidden=hidden).view(2, -1).mean(1).logit()
    torch.testing.assert_close(odds, torch.tensor([0.9]).logit() + torch.tensor([0.0, -9.0]), atol=0.01, rtol=0)
    assert mechanism.decay_gate.bias[0] < mechanism.decay_gate.bias[1]


@pytest.mark.parametrize(
    "options", [{"prefix_gain": 0.9}, {"prefix_gain": 0.9, "decay_gate": True, "hidden_size": HIDDEN}]
)
def test_with_the_prefix_removed_a_chunk_sees_only_itself(options: dict):
    mechanism, (query, key) = build(**options), inputs()
    value, hidden = key + 1.0, torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(3))
    mechanism.calibrate(query, key, hidden=hidden)
    whole = mechanism(query, key, value, hidden=hidden)
    mechanism.remove_prefix()
    removed = mechanism(query, key, value, hidden=hidden)
    last = slice(32, 40)
    alone = mechanism(query[:, :, last], key[:, :, last], value[:, :, last], hidden=hidden[:, last])
    torch.testing.assert_close(removed[:, :, last], alone)
    assert (whole[:, :, last] - alone).abs().max() > 0.1
    assert torch.equal(mechanism.prefix_share(query, key, hidden=hidden), torch.zeros(HEADS))
    assert "prefix removed" in repr(mechanism)


def test_without_a_local_part_there_is_no_prefix_to_measure_or_remove():
    mechanism, (query, key) = build(local_chunk=None), inputs()
    assert not mechanism.has_prefix
    with pytest.raises(ValueError, match="local_chunk=None"):
        mechanism.prefix_share(query, key)
    with pytest.raises(ValueError, match="local_chunk=None"):
        mechanism.remove_prefix()


def test_the_state_does_not_grow_with_the_context():
    case = polysketch()
    mechanism, (query, key, value, _) = case.build(), case.inputs(length=200)
    state = mechanism.init_state(2, dtype=torch.float64)
    sizes = []
    for start in range(0, 200, 50):
        span = slice(start, start + 50)
        _, state = mechanism.extend(query[:, :, span], key[:, :, span], value[:, :, span], state)
        sizes.append(state.nbytes)
    assert len(set(sizes)) == 1


def test_the_state_keeps_its_addresses():
    case = polysketch()
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    state = mechanism.init_state(2, dtype=torch.float64)
    addresses = {name: x.data_ptr() for name, x in state.tensors().items()}
    for span in (slice(0, 21), slice(21, 22), slice(22, 30)):
        _, returned = mechanism.extend(query[:, :, span], key[:, :, span], value[:, :, span], state)
        assert returned is state
    assert {name: x.data_ptr() for name, x in state.tensors().items()} == addresses
