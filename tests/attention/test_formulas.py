"""The mechanisms against their formulas, written out with all weights."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, logsigmoid

from attention.cases import HEAD_DIM, HEADS, HIDDEN, LENGTH, Case, polysketch
from polysketch import attention


def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    return layer_norm(x, (HEAD_DIM,), norm.weight, norm.bias, 1e-5)


def attend(weights: Tensor, value: Tensor, offset: float = 1.0) -> Tensor:
    weights = weights.tril()
    return weights @ value / (offset + weights.sum(-1, keepdim=True))


def test_softmax_attention_is_its_formula():
    query, key, value, _ = Case("softmax").inputs()
    expected = attend((query @ key.mT / HEAD_DIM**0.5).exp(), value, offset=0.0)
    torch.testing.assert_close(Case("softmax").build()(query, key, value), expected)


@pytest.mark.parametrize(("degree", "norm_scale"), [(2, 0.1), (4, 0.1), (8, 0.2)])
def test_polynomial_attention_is_its_formula(degree: int, norm_scale: float):
    case = Case("polynomial", {"degree": degree}, norm_scale=norm_scale)  # so that the 1 in the denominator counts
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    weights = (normed(query, mechanism.query_norm) @ normed(key, mechanism.key_norm).mT) ** degree
    assert 0.05 < (weights.tril().sum(-1) < 1).double().mean() < 0.95
    torch.testing.assert_close(mechanism(query, key, value), attend(weights, value))


@pytest.mark.parametrize("learned", [True, False])
def test_polysketch_attention_is_its_formula(learned: bool):
    case = polysketch(prefix_gain=0.5, learned=learned)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    query_normed, key_normed = normed(query, mechanism.query_norm), normed(key, mechanism.key_norm)
    sketched = (query, key) if learned else (query_normed, key_normed)
    features = [mechanism.feature_map.map_queries(sketched[0]), mechanism.feature_map.map_keys(sketched[1])]
    gain = mechanism.prefix_gain.log_gain.exp()[:, None, None]
    chunk = torch.arange(LENGTH) // 8
    exact = (query_normed @ key_normed.mT) ** 4
    weights = torch.where(chunk[:, None] == chunk, exact, gain * (features[0] @ features[1].mT) ** 2)
    torch.testing.assert_close(mechanism(query, key, value), attend(weights, value))


def unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("features", ["codes", "learned", "random"])
def test_polysketch_window_attention_is_its_formula(features: str):
    case = Case("polysketch-window", {"window": 6, "sketch_size": 6, "features": features, "hidden_size": HIDDEN})
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    unrotated = case.inputs(seed=7)[:2]
    mechanism.unit_scale.log_scale.data.normal_()
    scores = unit(query) @ unit(key).mT * mechanism.unit_scale.log_scale.exp()[:, None, None] / HEAD_DIM**0.5
    sketched = tuple(map(unit, unrotated)) if features == "random" else unrotated
    phi = mechanism.feature_map.map_queries(sketched[0]), mechanism.feature_map.map_keys(sketched[1])
    if features == "codes":
        (query_first, query_second), (key_first, key_second) = (x.chunk(2, -1) for x in phi)
        far = (query_first @ key_first.mT) * (query_second @ key_second.mT)
    else:
        far = (phi[0] @ phi[1].mT) ** 2
    far = far * (hidden @ mechanism.far_logit.weight.T + mechanism.far_logit.bias).exp().mT[..., None]
    beyond = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-6)
    weights = torch.where(beyond, far, scores.exp())
    output = mechanism(query, key, value, hidden=hidden, unrotated=unrotated)
    torch.testing.assert_close(output, attend(weights, value, offset=0.0))
    share = (weights * beyond).tril().sum(-1) / weights.tril().sum(-1)
    torch.testing.assert_close(
        mechanism.prefix_share(query, key, hidden=hidden, unrotated=unrotated), share[..., 6:].mean((0, 2))
    )


@pytest.mark.parametrize("sketched", ["unrotated", "rotated", "both"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_delta_rule_beside_a_window_is_its_formula(kv_heads: int, normed: bool, sketched: str):
    """The sums are written out: every token that leaves the window moves their answer to its key."""
    options = {"window": 6, "sketch_size": 4, "far_bias": 0.5, "normed": normed, "sketched": sketched}
    case = Case("polysketch", {**options, "hidden_size": HIDDEN}, kv_heads)
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    unrotated = case.inputs(seed=7)[:2]
    for parameter in (mechanism.unit_scale.log_scale, mechanism.confidence_scale):
        parameter.data.add_(0.5 * torch.randn_like(parameter))

    def of_heads(x: Tensor) -> Tensor:
        """What belongs to a key head, for each query head."""
        return x.repeat_interleave(HEADS // kv_heads, dim=1)

    def products(x: Tensor) -> Tensor:
        a, b = mechanism.feature_map.map(x).chunk(2, -1)
        return torch.einsum("bhni,bhnj->bhnij", a, b).flatten(-2)

    strength = (hidden @ mechanism.strength_logit.weight.T + mechanism.strength_logit.bias).sigmoid().mT
    both = tuple(torch.cat(pair, -1) for pair in zip((query, key), unrotated, strict=True))
    phi_query, phi_key = map(products, {"unrotated": unrotated, "rotated": (query, key), "both": both}[sketched])
    ones = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    sums, recalled = value.new_zeros(*value.shape[:2], 16, HEAD_DIM + 1), []
    for token in range(LENGTH):
        if token >= 6:
            phi = phi_key[:, :, token - 6, :, None]
            missing = ones[:, :, token - 6, None] - phi.mT @ sums
            sums = sums + strength[:, :, token - 6, None, None] * phi * missing
        recalled.append((phi_query[:, :, token, None] @ of_heads(sums))[:, :, 0])
    found = torch.stack(recalled, 2)
    scale = mechanism.confidence_scale.repeat_interleave(HEADS // kv_heads)[:, None]
    logit = hidden @ mechanism.far_logit.weight.T + mechanism.far_logit.bias
    logit = of_heads(logit.mT) + scale * found[..., -1]
    beside = logit.exp() * (torch.arange(LENGTH) >= 6)
    near_query, near_key = (unit(query), unit(key)) if normed else (query, key)
    scores = near_query @ of_heads(near_key).mT * of_heads(mechanism.unit_scale.log_scale.exp()[None, :, None, None])
    near = (scores / HEAD_DIM**0.5).exp() * torch.ones(LENGTH, LENGTH).tril().triu(-5)
    expected = near @ of_heads(value) + beside[..., None] * found[..., :-1]
    expected = expected / (near.sum(-1) + beside)[..., None]
    torch.testing.assert_close(mechanism(query, key, value, hidden=hidden, unrotated=unrotated), expected)


def test_the_gate_decays_sketched_weights_by_the_layers_input():
    case = polysketch(local_chunk=None, decay_gate=True, hidden_size=HIDDEN)
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    features = mechanism.feature_map.map_queries(query), mechanism.feature_map.map_keys(key)
    log_decay = logsigmoid(hidden @ mechanism.decay_gate.weight.T + mechanism.decay_gate.bias).mT.cumsum(-1)
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).exp()
    weights = (features[0] @ features[1].mT) ** 2 * decay
    torch.testing.assert_close(mechanism(query, key, value, hidden=hidden), attend(weights, value))
    torch.testing.assert_close(mechanism.decay_gate.bias, torch.linspace(3.0, 8.0, HEADS, dtype=torch.float64))


def test_a_gate_without_the_layers_input_is_refused():
    case = polysketch(decay_gate=True, hidden_size=HIDDEN)
    query, key, value, hidden = case.inputs()
    mechanism = attention.build("polysketch-paper", num_heads=HEADS, head_dim=HEAD_DIM, **case.options).double()
    for wrong in (None, hidden[..., :2]):
        with pytest.raises(ValueError, match="needs hidden"):
            mechanism(query, key, value, hidden=wrong)
