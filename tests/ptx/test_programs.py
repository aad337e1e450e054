"""Every program with a backward pass, in bfloat16 for devices that are not here, against the definition in float64.

A CPU executes the PTX that Triton makes for them (`ptx.launching`): a wrong result, a race, a missing fence and an
address outside of a tensor all fail. Tolerances are those of tests/device. Devices with tensor memory (10.0) are left
out, and so is what `ptxas` makes of PTX: that needs a device.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.covering import first_always
from device import plain, test_convolution, test_cross_entropy, test_gated_gelu, test_head_sketch, test_rotated_heads
from device.test_linear import TOLERANCES
from device.yardstick import Named, assert_as_good_as_plain, assert_within, moved, rounded
from ops.linear_cases import Case, assert_precision_agrees
from ops.test_linear_backends import PAIRWISE, WITH_HISTORY
from polysketch import ops
from polysketch.benchmarking.timing import matmul_precision
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.cross_entropy import cross_entropy_
from polysketch.ops.gated_gelu import gated_gelu
from polysketch.ops.learned_sketch import learned_sketch
from polysketch.ops.low_rank_sketch import low_rank_sketch
from ptx.launching import executing
from ptx.parsing import Fault

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
full = pytest.mark.full


# Widths of one block that is full, of one that is not, and of more than one.
USUAL = Case(local_chunk=0, length=65, batch=1, heads=2, key_heads=1, features=20, value_dim=9, compute_chunk=None)
LOCAL = replace(USUAL, local_chunk=16, head_dim=12)
LINEAR = [
    USUAL,
    replace(USUAL, power=1),
    LOCAL,
    replace(USUAL, power=1, factors=2, features=20, decays=True),
    replace(USUAL, power=1, features=64, value_dim=64, length=150),
    replace(USUAL, power=1, features=40, value_dim=40, length=150),
    replace(USUAL, power=1, features=7, value_dim=1, decays=True),
    replace(USUAL, power=1, features=130, value_dim=33),
    replace(USUAL, power=1, compute_chunk=32, padded=True, batch=2, causal=False),
    replace(USUAL, features=32, value_dim=64, length=150),
    replace(USUAL, features=16, value_dim=16, compute_chunk=32, decays=True, padded=True, batch=2),
    replace(USUAL, features=33, value_dim=65, normalize=False),
    replace(USUAL, features=5, value_dim=128, offset=0.0),
    replace(USUAL, causal=False, padded=True, batch=2),
    replace(USUAL, length=1),
    replace(USUAL, key_heads=2, heads=4, length=300, features=16, value_dim=32),
    replace(LOCAL, features=32, head_dim=64, value_dim=64, local_chunk=256, length=300),
    replace(LOCAL, features=32, head_dim=128, value_dim=128, local_chunk=64, length=150),
    replace(LOCAL, features=64, head_dim=64, value_dim=64, local_chunk=64, length=100),
    replace(LOCAL, head_dim=80, value_dim=80, features=48, local_chunk=64, length=150, decays=True),
    replace(LOCAL, causal=False, padded=True, batch=2),
    replace(LOCAL, power=1, degree=2, decays=True, head_dim=33, value_dim=17, features=64),
    replace(LOCAL, degree=8, normalize=False, head_dim=16, value_dim=48, features=12),
    replace(USUAL, power=1, factors=2, features=48, value_dim=64, length=150),
    replace(USUAL, power=1, factors=2, features=64, value_dim=128, length=70),
    replace(USUAL, power=1, factors=2, features=34, value_dim=33, causal=False, offset=0.0),
    replace(LOCAL, power=1, factors=2, features=22, decays=True, padded=True, batch=2),
]


@pytest.mark.parametrize("case", first_always(LINEAR), ids=str)
def test_linear_attention_and_its_gradients_agree_with_the_reference(case, launched):
    assert_precision_agrees(case, "triton", TOLERANCES[DTYPE], dtype=DTYPE)
    assert launched["linear_outputs"]
    assert launched["linear_sums_gradient"]


@full
@pytest.mark.parametrize(
    "case", [case for case in [*PAIRWISE, *WITH_HISTORY] if case.length < 200 and case.block_size is None], ids=str
)
def test_states_masks_and_chunks_agree_with_the_reference(case, launched):
    assert_precision_agrees(replace(case, batch=2 if case.padded else 1), "triton", TOLERANCES[DTYPE], dtype=DTYPE)
    assert launched


# Heads, key heads, queries, width, width of values, causal, degree.
POLYNOMIAL = [
    (2, 1, 37, 20, 9, True, 4),
    (2, 1, 70, 20, 9, True, 4),
    (1, 1, 70, 16, 16, False, 2),
    (1, 1, 150, 64, 64, True, 4),
    (2, 2, 70, 40, 33, False, 6),
    (1, 1, 150, 128, 128, True, 4),
    (1, 1, 70, 72, 100, True, 8),
    (2, 1, 17, 7, 3, True, 2),
    (1, 1, 1, 64, 64, True, 4),
]


@pytest.mark.parametrize("size", first_always(POLYNOMIAL, 1), ids=str)
def test_polynomial_attention_errs_like_the_plain_formula(size, launched):
    heads, key_heads, length, width, value_width, causal, degree = size
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    query, key = (width**-0.25 * normal(1, count, length, width) for count in (heads, key_heads))
    given = {"query": query, "key": key, "value": normal(1, key_heads, length, value_width)}
    options = {"degree": degree, "offset": 1.0, "causal": causal}
    attend = partial(ops.polynomial_attention, **options, backend="triton")
    assert_as_good_as_plain(attend, partial(plain.polynomial_attention, **options), given, DTYPE, CPU)
    assert launched.keys() == {"polynomial_forward", "polynomial_grad_query", "polynomial_grad_key_value"}


@full
@pytest.mark.parametrize("width", [20, 64])
def test_polynomial_attention_leaves_masked_keys_out(width, launched):
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {name: normal(2, 1, 70, width).div(width**0.25) for name in ("query", "key", "value")}
    mask = torch.arange(70) >= torch.tensor([23, 0])[:, None]
    options = {"degree": 4, "offset": 1.0, "causal": True, "key_mask": mask}
    attend, formula = (partial(ops.polynomial_attention, **options, backend=one) for one in ("triton", "reference"))
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    assert launched


# Width of heads, sketch size, degree, tokens.
SKETCHES = [(20, 10, 4, 21), (64, 32, 4, 150), (16, 16, 4, 70), (64, 64, 4, 70), (33, 20, 8, 37), (128, 32, 4, 70)]


def networks(width: int, size: int, degree: int) -> Named:
    """Weights, none of which is zero or one."""
    torch.manual_seed(0)
    module = LearnedSketch(width, sketch_size=size, degree=degree)
    weights = [weight.detach().double() for network in module.networks for weight in network.weights()]
    weights = [weight + 0.1 * weight.std().nan_to_num(1.0) * torch.randn_like(weight) for weight in weights]
    return {f"weight_{index:02}": weight for index, weight in enumerate(weights)}


def sketched(backend: str, leaves: int, x: Tensor, **weights: Tensor) -> Tensor:
    """The op."""
    return learned_sketch(x, list(weights.values()), leaves, backend=backend)


@pytest.mark.parametrize("size", first_always(SKETCHES, 1), ids=str)
def test_the_learned_sketch_errs_like_the_plain_formula(size, launched):
    width, sketch_size, degree, tokens = size
    weights = networks(width, sketch_size, degree)
    given = {"x": torch.randn(1, 2, tokens, width, dtype=torch.float64), **weights}
    attend, formula = (partial(sketched, backend, degree // 2) for backend in ("triton", "reference"))
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    assert launched.keys() >= {"learned_sketch_inputs_backward", "learned_sketch_weights_backward"}


# Width of heads, features, degree, rank, maps, tokens.
LOW_RANK = [
    (20, 37, 3, 2, 2, 37),
    (64, 256, 4, 1, 1, 150),
    (128, 40, 6, 1, 1, 70),
    (16, 64, 8, 1, 2, 70),
    (7, 3, 1, 2, 1, 1),
]


@pytest.mark.parametrize("size", first_always(LOW_RANK, 1), ids=str)
def test_the_low_rank_sketch_errs_like_the_plain_formula(size, launched):
    width, features, degree, rank, maps, tokens = size
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors = normal(maps, rank, degree, width, features) * width**-0.5
    given = {"x": normal(1, 2, tokens, width), "factors": factors}
    attend, formula = (partial(low_rank_sketch, backend=backend) for backend in ("triton", "reference"))
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    backward = {f"low_rank_sketch_{part}_backward" for part in ("inputs", "factors")}
    assert launched.keys() == {"low_rank_sketch", *backward}


# Width of heads, features (0 for the norm alone), maps, tokens.
HEAD_SKETCH = [(64, 32, 1, 70), (20, 37, 2, 37), (64, 0, 1, 150), (128, 64, 1, 70), (7, 3, 1, 1)]


@pytest.mark.parametrize("size", first_always(HEAD_SKETCH), ids=str)
def test_norm_and_sketch_of_heads_err_like_the_plain_formula(size, launched):
    width, features, maps, tokens = size
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {"x": normal(1, 2, tokens, width), "scale": 1 + normal(width) / 4, "bias": normal(width)}
    matrices = (normal(maps, 2, width, features) * width**-0.5).to(DTYPE)
    attend, formula = (partial(test_head_sketch.both, matrices, backend) for backend in ("triton", "reference"))
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    assert launched.keys() == {"head_sketch", "head_sketch_backward"}


# Heads, heads with filters of their own, channels, taps, tokens; whether there are tokens before and a mask.
CONVOLUTIONS = [(2, 1, 40, 4, 70, True), (1, 1, 130, 4, 130, False), (2, 2, 9, 10, 37, True), (1, 1, 64, 1, 1, False)]


@pytest.mark.parametrize("size", first_always(CONVOLUTIONS), ids=str)
def test_causal_convolutions_err_like_the_plain_formula(size, launched):
    heads, filters, width, taps, tokens, continued = size
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {"x": normal(1, heads, tokens, width), "weight": normal(filters, width, taps)}
    mask = torch.arange(tokens)[None] % 7 != 3 if continued else None
    if continued:
        given["tail"] = normal(1, heads, taps - 1, width)
    attend, formula = partial(test_convolution.by, "triton", mask), partial(test_convolution.plain, key_mask=mask)
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    assert launched.keys() == {"causal_convolution", "causal_convolution_backward"}


# Width of heads, whether rows have positions of their own, what is made of heads, tokens.
ROTATED_HEADS = [
    (64, False, "norm and rotation, kept", 37),
    (20, True, "norm and rotation", 37),
    (128, False, "norm", 17),
    (256, True, "rotation", 9),
    (2, False, "norm and rotation, kept", 1),
]


@pytest.mark.parametrize("size", first_always(ROTATED_HEADS), ids=str)
def test_norm_and_rotation_of_heads_err_like_the_plain_formula(size, launched):
    width, own, parts, tokens = size
    given, turn = test_rotated_heads.case(width, own, parts, tokens, heads=5)
    attend, formula = (
        partial(test_rotated_heads.both, turn, "kept" in parts, backend) for backend in ("triton", "reference")
    )
    assert_as_good_as_plain(attend, formula, given, DTYPE, CPU)
    assert launched.keys() == {"rotated_heads", "rotated_heads_backward"}


@pytest.mark.parametrize(("inner", "rows"), first_always([(1360, 3), (33, 5), (1, 1)], several=True))
def test_the_middle_of_a_gated_linear_unit_errs_like_the_plain_formula(inner, rows, launched):
    gate, formula = (partial(gated_gelu, backend=backend) for backend in ("triton", "reference"))
    assert_as_good_as_plain(gate, formula, test_gated_gelu.case(inner, rows), DTYPE, CPU)
    assert launched.keys() == {"gated_gelu", "gated_gelu_backward"}


@pytest.mark.parametrize(
    ("vocabulary", "rows"), first_always([(9_000, 2), (8_193, 4), (2_048, 3), (1, 2)], several=True)
)
def test_cross_entropy_and_its_gradients_err_like_the_plain_formula(vocabulary, rows, launched):
    op, formula = (partial(test_cross_entropy.as_losses, name, DTYPE) for name in ("triton", "reference"))
    assert_as_good_as_plain(op, formula, test_cross_entropy.case(rows, vocabulary), torch.float32, CPU)
    assert launched.keys() == {"cross_entropy", "cross_entropy_gradient"}


@pytest.mark.parametrize("outside", [33, -1, 2**40])
def test_nothing_is_read_or_written_for_a_target_outside_the_vocabulary(outside, launched):
    targets = torch.tensor([32, outside])
    found = cross_entropy_(torch.randn(2, 33), torch.randn(33), targets, torch.tensor(1.0), DTYPE, backend="triton")
    assert found.losses.isnan().tolist() == [False, True]
    assert launched.keys() == {"cross_entropy", "cross_entropy_gradient"}


# Features, factors, width, tokens.
DELTA = [(22, 2, 5, 70), (48, 2, 65, 150), (20, 1, 48, 70), (64, 1, 64, 70), (64, 2, 33, 70), (37, 1, 9, 1)]


def delta_inputs(features: int, factors: int, width: int, tokens: int) -> Named:
    """Keys of length one, which lean toward each other so that every token changes what all later ones write."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = (normal(1, 1, tokens, features) + 0.3).unflatten(-1, (factors, -1))
    key, value = F.normalize(parts, dim=-1).flatten(-2), normal(1, 1, tokens, width)
    return {"key": key, "value": value, "strength": normal(1, 1, tokens).sigmoid()}


def written(backend: str, factors: int, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
    """The op, which computes in float32, by products of tf32 where PyTorch's switch allows them."""
    return ops.delta_writes(key, value, strength, factors=factors, backend=backend)


@torch.no_grad()
def test_the_delta_rule_writes_what_the_reference_writes(launched):
    given = rounded(delta_inputs(22, 2, 5, 37), DTYPE)
    with matmul_precision("high"):
        found = written("triton", 2, **moved(given, CPU, DTYPE))
    assert_within({"output": found}, {"output": written("reference", 2, **given)}, TOLERANCES[DTYPE])
    assert launched == {"delta_inverse": 1, "delta_errors": 1}


@full
@pytest.mark.parametrize("products", ["high", "highest"])
@pytest.mark.parametrize("size", DELTA, ids=str)
def test_the_delta_rule_errs_like_the_plain_formula(size, products, launched):
    factors = size[1]
    attend, formula = partial(written, "triton", factors), partial(plain.delta_writes, factors=factors)
    with matmul_precision(products):
        assert_as_good_as_plain(attend, formula, delta_inputs(*size), DTYPE, CPU)
    assert launched.keys() == {"delta_inverse", "delta_errors"}


NEEDED = ["fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;", "bar.sync", "cp.async.wait_group"]


@pytest.mark.parametrize("word", [*NEEDED[:1], *(pytest.param(word, marks=full) for word in NEEDED[1:])])
def test_a_program_without_its_fences_barriers_or_waits_is_a_fault(word):
    """Planted into real programs, what `test_instructions.py` plants into small ones."""

    def without(text: str) -> str:
        return "\n".join(line for line in text.split("\n") if not line.strip().startswith(word))

    with pytest.raises(Fault), executing((9, 0), without):
        assert_precision_agrees(replace(USUAL, power=1, features=64, value_dim=64), "triton", 1.0, dtype=DTYPE)
