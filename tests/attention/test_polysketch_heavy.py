"""Polysketch with heavy entries: its formula, its limits, its shares of the mass, and what it is for."""

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, HEAD_DIM, HEADS, Case, heavy
from polysketch import attention, ops
from polysketch.attention import PolysketchHeavyAttention
from polysketch.ops.heavy import chunk_edges
from polysketch.ops.heavy.reference import candidates

HEAVY_CASES = [case for case in CASES if case.name == "polysketch-heavy"]
EVERY_CASE = pytest.mark.parametrize("case", HEAVY_CASES, ids=str)


def weights_of(
    mechanism: PolysketchHeavyAttention, query: Tensor, key: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sketched, local and heavy weights, each (batch, heads, queries, keys) and zero where another kind stands."""
    group, length, chunk = query.shape[1] // key.shape[1], query.shape[2], mechanism.local_chunk
    normed = mechanism.query_norm(query), mechanism.key_norm(key)
    codes = [ops.line_codes(x, mechanism.hyperplanes) for x in normed]
    before, after = chunk_edges(query, chunk)
    chosen = candidates(*codes, before, None if causal else after, mechanism.heavy_size)
    features = mechanism.feature_map.map_both(*((query, key) if mechanism.learned else normed))
    gain = mechanism.prefix_gain.log_gain.exp().repeat_interleave(group)[:, None, None]
    sketched = gain * (features[0] @ features[1].repeat_interleave(group, 1).mT) ** 2
    exact = (normed[0] @ normed[1].repeat_interleave(group, 1).mT) ** mechanism.degree
    place = torch.arange(length) // chunk
    same, seen = place[:, None] == place, torch.ones(length, length, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    return sketched * (seen & ~same & ~chosen), exact * (seen & same), exact * chosen


@EVERY_CASE
@pytest.mark.parametrize("causal", [True, False])
def test_heavy_attention_is_its_formula(case: Case, causal: bool):
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    weights = sum(weights_of(mechanism, query, key, causal=causal))
    expected = weights @ value.repeat_interleave(HEADS // case.kv_heads, 1) / (1 + weights.sum(-1, keepdim=True))
    torch.testing.assert_close(mechanism(query, key, value, causal=causal), expected, rtol=1e-8, atol=1e-9)


@EVERY_CASE
def test_every_kind_of_weight_holds_a_sixth_of_the_mass_or_more(case: Case):
    mechanism, (query, key, _, _) = case.build(), case.inputs()
    masses = torch.stack(
        [x.sum(-1)[:, :, mechanism.local_chunk :] for x in weights_of(mechanism, query, key, causal=True)]
    )
    shares = (masses / masses.sum(0)).mean((1, 3)).float()
    assert shares.min() > 0.15
    torch.testing.assert_close(mechanism.prefix_share(query, key), shares[0], rtol=1e-4, atol=1e-5)


def build_pair(name: str, **options) -> tuple[PolysketchHeavyAttention, attention.Mechanism]:
    """The mechanism and another, with the same norms, sketch and gain."""
    case = heavy(kv_heads=2, **options)
    mechanism = case.build()
    own = mechanism.state_dict()
    shared = {k: v for k, v in case.options.items() if k in attention.option_names(name)}
    other = attention.build(name, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=2, **shared).double()
    other.load_state_dict({key: own[key] for key in other.state_dict()})
    return mechanism, other


@pytest.mark.parametrize("causal", [True, False])
def test_with_one_bucket_that_holds_all_keys_it_is_exact_and_so_are_its_gradients(causal: bool):
    mechanism, exact = build_pair("polynomial", hash_bits=1, heavy_size=37)
    inputs = tuple(x.requires_grad_() for x in heavy(kv_heads=2).inputs()[:3])
    outputs = [x(*inputs, causal=causal) for x in (mechanism, exact)]
    torch.testing.assert_close(*outputs, rtol=1e-8, atol=1e-9)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in outputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert not mechanism.prefix_share(*inputs[:2]).any()


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_key_in_the_buckets_of_queries_it_is_polysketch(causal: bool):
    mechanism, sketched = build_pair("polysketch-paper")
    query, key, value, _ = heavy(kv_heads=2).inputs()
    found = mechanism(query, key, value, causal=causal)
    assert not torch.allclose(found, sketched(query, key, value, causal=causal))
    mechanism.hyperplanes.zero_()[:2] = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    # Lines along the first axis lie on the same side of both, those along the second on different ones.
    query[..., :2], key[..., :2] = torch.tensor([1000.0, 0.0]), torch.tensor([0.0, 1000.0])
    torch.testing.assert_close(
        mechanism(query, key, value, causal=causal), sketched(query, key, value, causal=causal), rtol=1e-8, atol=1e-9
    )


def test_a_query_and_its_opposite_get_the_same():
    mechanism = heavy(learned=False, kv_heads=2).build()
    mechanism.query_norm.bias.data.zero_()
    query, key, value, _ = heavy(kv_heads=2).inputs()
    torch.testing.assert_close(mechanism(-query, key, value), mechanism(query, key, value))


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_calibrate_leaves_heavy_entries_to_the_exact_mass(share: float):
    mechanism, (query, key, _, _) = heavy(kv_heads=2, prefix_gain=share).build(), heavy(kv_heads=2).inputs()
    assert (mechanism.prefix_share(query, key).view(2, -1).mean(1) - share).abs().max() < 1e-4


def test_with_the_prefix_removed_the_chunk_and_the_heavy_entries_are_left():
    mechanism, (query, key, value, _) = heavy().build(), heavy().inputs()
    _, local, chosen = weights_of(mechanism, query, key, causal=True)
    mechanism.remove_prefix()
    weights = local + chosen
    expected = weights @ value / (1 + weights.sum(-1, keepdim=True))
    torch.testing.assert_close(mechanism(query, key, value), expected, rtol=1e-8, atol=1e-9)
    assert not mechanism.prefix_share(query, key).any()


def test_the_state_keeps_its_size_and_its_addresses():
    mechanism, (query, key, value, _) = heavy().build(), heavy().inputs(length=100)
    state = mechanism.init_state(2, dtype=torch.float64)
    tensors = {**state.tensors(), **state.attention.tensors()}
    addresses, nbytes = {name: x.data_ptr() for name, x in tensors.items()}, state.nbytes
    for start, end in ((0, 50), (50, 51), (51, 56), (56, 57), (57, 100)):
        span = slice(start, end)
        _, returned = mechanism.extend(query[:, :, span], key[:, :, span], value[:, :, span], state)
        assert returned is state
    assert {name: x.data_ptr() for name, x in {**state.tensors(), **state.attention.tensors()}.items()} == addresses
    assert state.nbytes == nbytes
    assert bool(state.filled.all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buckets_are_those_of_full_precision(dtype: torch.dtype):
    mechanism = heavy(hash_bits=6).build(dtype=torch.float32).to(dtype)
    query, key, _, _ = heavy().inputs(dtype=dtype, length=500)
    _, options = mechanism.operands(query, key, dtype, None)
    found = mechanism._codes(query, key, options["local"])
    wide, (query, key) = mechanism.double(), (query.double(), key.double())
    _, options = wide.operands(query, key, torch.float64, None)
    assert all(torch.equal(*codes) for codes in zip(found, wide._codes(query, key, options["local"]), strict=True))


def test_rounding_cannot_bring_the_mass_below_its_offset():
    """Large sketched weights where exact ones are nearly nothing: all of them taken out, a rounding error is left."""
    mechanism = heavy(hash_bits=1, heavy_size=64).build(dtype=torch.float32)
    mechanism.prefix_gain.log_gain.data.fill_(25.0)
    query, key, value, _ = heavy().inputs(dtype=torch.float32)
    mechanism.query_norm.weight.data.mul_(1e-3)
    mechanism.query_norm.bias.data.mul_(1e-3)
    sums = mechanism(query, key, torch.ones_like(value))
    assert sums.isfinite().all()
    operands, options = mechanism._operands(query, key, torch.float32)
    ones = torch.ones(2, HEADS, 37, 1)
    whole = ops.linear_attention(*operands, ones, causal=True, **options).output
    codes = mechanism._codes(query, key, options["local"])
    rest = whole + mechanism._correction(operands, ones, options["local"], codes, None, causal=True)
    assert rest.min() < -1.0  # or this test shows nothing


def test_a_key_that_matters_is_found_among_thousands():
    """Four keys along each query, far back among 4,096: over half of the mass, and lost in the noise of a sketch.

    Measured: relative errors of 0.22 and 0.29 with two seeds against 0.97 with the sketch alone, each at its best gain.
    """
    torch.manual_seed(0)
    length, copies, sizes = 4096, 4, {"num_heads": 1, "head_dim": 64}
    options = {"sketch_size": 16, "learned": False, "local_chunk": 256, "prefix_gain": 0.5}
    mechanism = attention.build("polysketch-heavy", **sizes, **options, hash_bits=7)
    sketched, exact = attention.build("polysketch-paper", **sizes, **options), attention.build("polynomial", **sizes)
    own = mechanism.state_dict()
    sketched.load_state_dict({name: own[name] for name in sketched.state_dict()})
    query, key, value = (torch.randn(1, 1, length, 64) for _ in range(3))
    rows, columns = slice(length - 16, length), torch.randperm(length - 512)[: 16 * copies].view(copies, 16)
    key[:, :, columns] = query[:, :, None, rows]
    value[:, :, columns] = value[:, :, columns[:1]]
    errors = {}
    with torch.no_grad():
        expected = exact(query, key, value)[:, :, rows]
        for name, approximate in (("heavy", mechanism), ("sketched", sketched)):
            found = []
            for gain in (-6.0, -5.0, -4.0):
                approximate.prefix_gain.log_gain.fill_(gain)
                difference = approximate(query, key, value)[:, :, rows] - expected
                found.append(float(difference.norm() / expected.norm()))
            errors[name] = min(found)
    assert errors["heavy"] < 0.35
    assert errors["sketched"] > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_chunk": None}, "polysketch-heavy needs a local_chunk"),
        ({"heavy_size": 0}, "heavy_size must be at least 1"),
        ({"hash_bits": 0}, "hash_bits must be at least 1"),
        ({"hash_bits": 17}, "hash_bits must be at most 16"),
        ({"decay_gate": True}, "has no option 'decay_gate'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        attention.build("polysketch-heavy", num_heads=2, head_dim=8, **options)
