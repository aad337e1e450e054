"""The chunked backend computes what the reference defines: output, every gradient, states, in every dtype."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from ops.linear_cases import Case, assert_backends_agree, gradients, make, prefix_share, relative_error, run
from polysketch import ops
from polysketch.ops.linear import blocks, spans
from polysketch.ops.linear.packing import symmetrize
from polysketch.ops.native import why_unavailable

# Blocks within a chunk, of several chunks, longer than all chunks and than the row; with local chunks and without.
BLOCKS = [
    Case(block_size=4, local_chunk=16, length=65),
    Case(block_size=16, local_chunk=16, padded=True, length=63, key_heads=1),
    Case(block_size=32, local_chunk=16, padded=True, length=75),
    Case(block_size=96, local_chunk=16, power=1, length=65, normalize=False),
    Case(block_size=5, local_chunk=0, padded=True, length=65),
    Case(block_size=12, local_chunk=0, power=1, factors=2, length=63, offset=0.0),
    Case(block_size=300, local_chunk=0, length=700, batch=1, heads=2, features=12),
    Case(block_size=48, local_chunk=0, power=1, length=700, batch=1, heads=2, padded=True, compute_chunk=None),
    Case(block_size=270, local_chunk=0, power=1, length=700, batch=1, heads=2, features=7, compute_chunk=16),
    Case(block_size=1000, local_chunk=0, length=300, batch=2, heads=2, features=5, padded=True),
]
# Each pair of option values occurs together in some row; the full product runs under the marker `full`.
PAIRWISE = [
    Case(power=2, local_chunk=16, decays=False, padded=False, length=65),
    Case(power=2, local_chunk=16, decays=True, padded=True, length=63),
    Case(power=2, local_chunk=0, decays=True, padded=False, length=65),
    Case(power=2, local_chunk=0, decays=False, padded=True, length=63),
    Case(power=1, local_chunk=16, decays=True, padded=False, length=63),
    Case(power=1, local_chunk=16, decays=False, padded=True, length=65),
    Case(power=1, local_chunk=0, decays=False, padded=False, length=63),
    Case(power=1, local_chunk=0, decays=True, padded=True, length=65),
    Case(power=2, local_chunk=40, degree=2, key_heads=4, length=65, normalize=False),
    Case(power=2, local_chunk=40, degree=6, key_heads=1, length=63, offset=0.0),
    Case(power=1, local_chunk=0, key_heads=1, length=65, normalize=False, compute_chunk=None),
    Case(power=2, local_chunk=16, features=16, length=1),
    Case(power=2, local_chunk=0, features=48, length=1),
    Case(power=2, local_chunk=256, features=32, head_dim=64, value_dim=64, length=1000, batch=1, heads=2),
    Case(power=1, local_chunk=0, features=40, length=1000, batch=1, heads=2, compute_chunk=None),
    *BLOCKS,
    Case(power=2, causal=False, local_chunk=16, length=65),
    Case(power=2, causal=False, local_chunk=16, padded=True, length=63),
    Case(power=1, causal=False, local_chunk=40, padded=True, length=63, offset=0.0),
    Case(power=1, causal=False, local_chunk=0, padded=True, length=65),
    Case(power=2, causal=False, local_chunk=0, length=65, normalize=False),
    Case(power=2, causal=False, local_chunk=1024, padded=True, length=37),
    Case(power=1, factors=2, local_chunk=0, decays=True, padded=True, length=65),
    Case(power=1, factors=2, local_chunk=16, decays=True, key_heads=1, length=63),
    Case(power=1, factors=2, local_chunk=0, features=6, length=63, normalize=False, compute_chunk=40),
    Case(power=1, factors=2, causal=False, local_chunk=16, padded=True, length=65),
    Case(power=1, factors=2, causal=False, local_chunk=0, features=34, length=63, offset=0.0),
    Case(power=1, factors=2, local_chunk=0, features=48, length=700, batch=1, heads=2, compute_chunk=None),
]
WITH_HISTORY = [
    Case(block_size=8, local_chunk=16, length=63, history=40),
    Case(block_size=32, local_chunk=16, length=63, history=32),
    Case(block_size=12, local_chunk=0, length=63, history=24),
    Case(block_size=270, local_chunk=0, length=600, history=270, batch=1, heads=2, features=7),
    Case(power=2, local_chunk=16, length=63, history=37),
    Case(power=2, local_chunk=16, length=5, history=13, decays=True),
    Case(power=1, local_chunk=16, length=65, history=32, decays=True, padded=True),
    Case(power=2, local_chunk=0, length=63, history=21, decays=True),
    Case(power=1, local_chunk=0, length=1, history=5),
    Case(power=2, local_chunk=16, length=1, history=15, key_heads=4),
    Case(power=1, factors=2, local_chunk=0, length=63, history=21, decays=True),
    Case(power=1, factors=2, local_chunk=16, length=5, history=13, padded=True),
]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What an operator forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", PAIRWISE + WITH_HISTORY, ids=str)
def test_chunked_agrees_with_reference(case):
    assert_backends_agree(case)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    list(product([1, 2], [0, 16, 40], [False, True], [False, True], [1, 63, 65, 200], [0, 1, 16, 37])),
    ids=str,
)
def test_chunked_agrees_with_reference_in_every_combination(options):
    names = ("power", "local_chunk", "decays", "padded", "length", "history")
    assert_backends_agree(Case(**dict(zip(names, options, strict=True))))


@pytest.mark.parametrize("case", [c for c in PAIRWISE if c.local_chunk and c.length > c.local_chunk], ids=str)
def test_sketched_weights_hold_a_middling_share_of_the_mass(case):
    """Else a broken prefix could hide behind the exact weights, or a broken local part behind the sketched ones."""
    assert 0.3 < prefix_share(case, make(case)) < 0.7


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        Case(local_chunk=3, length=7, batch=1, heads=2, key_heads=1, features=3, head_dim=2, value_dim=2, decays=True),
        Case(local_chunk=3, length=4, history=5, batch=1, heads=2, features=3, head_dim=2, value_dim=2, decays=True),
        Case(power=1, local_chunk=0, length=5, batch=1, heads=2, features=3, value_dim=2, decays=True, compute_chunk=2),
        Case(causal=False, local_chunk=3, length=7, batch=1, heads=2, features=3, head_dim=2, value_dim=2),
        Case(power=1, factors=2, local_chunk=3, length=5, history=4, batch=1, features=4, head_dim=2, value_dim=2),
        Case(power=1, factors=2, local_chunk=0, length=5, batch=1, features=4, value_dim=2, compute_chunk=2),
    ],
    ids=str,
)
def test_gradients_are_those_of_finite_differences(case, backend):
    tensors, state = make(case), None
    if case.history:
        state = run(case, make(case, case.history), backend="reference", return_state=True).state
    leaves = tensors.leaves()
    parts = {} if state is None else {n: x for n, x in state.tensors().items() if n != "position" and x.numel()}

    def function(*values):
        moved = replace(tensors, **dict(zip(leaves, values, strict=False)))
        begun = None if state is None else replace(state, **dict(zip(parts, values[len(leaves) :], strict=True)))
        result = run(case, moved, backend=backend, state=begun, return_state=case.causal)
        ends = [] if result.state is None else [x for n, x in result.state.tensors().items() if n != "position"]
        return result.output, result.denominator, *[x for x in ends if x.numel() and x.requires_grad]

    values = [x.clone().requires_grad_() for x in (*leaves.values(), *parts.values())]
    assert torch.autograd.gradcheck(function, values, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("power", "factors"), [(1, 1), (2, 1), (1, 2)])
def test_error_is_at_most_twice_that_of_the_plain_formula(dtype, power, factors):
    case = Case(power=power, local_chunk=64, length=200, features=32, head_dim=32, value_dim=32, decays=True)
    case = replace(case, factors=factors)
    rounded = make(replace(case, dtype=dtype))
    exact = gradients(case, rounded.map(lambda x: x.double()), "reference")
    found = gradients(case, rounded, "chunked")
    plain = gradients(case, rounded, "reference")
    for name, expected in exact.items():
        limit = 2 * max(relative_error(plain[name], expected), torch.finfo(dtype).eps)
        assert relative_error(found[name], expected) <= limit, name
        assert found[name].dtype == plain[name].dtype == (torch.float32 if name == "denominator" else dtype)


def test_any_strides_give_the_same_result():
    case = Case(length=65)
    tensors = make(case)
    turned = tensors.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert not turned.query.is_contiguous()
    assert torch.equal(run(case, turned).output, run(case, tensors).output)


@pytest.mark.parametrize("power", [1, 2])
def test_query_length_may_differ_when_not_causal(power):
    case = Case(power=power, causal=False, local_chunk=0, padded=True)
    keys, queries = make(case, 65), make(case, 7)
    mixed = replace(keys, query=queries.query)
    assert relative_error(run(case, mixed).output, run(case, mixed, backend="reference").output) < 1e-12


def test_result_does_not_depend_on_compute_chunk():
    case = Case(local_chunk=0, length=100, decays=True)
    whole = run(case, make(case), compute_chunk=1000).output
    for size in (1, 7, 64):
        assert relative_error(run(case, make(case), compute_chunk=size).output, whole) < 1e-12


def test_lower_triangular_product_is_the_masked_matrix_product():
    a, b, c = (torch.randn(2, 3, 300, width, dtype=torch.float64) for width in (10, 10, 7))
    for power in (1, 2):
        expected = ((a @ b.mT) ** power).tril() @ c
        found = ops.lower_triangular_multiply(a, b, c, power=power, compute_chunk=64)
        assert relative_error(found, expected) < 1e-12


def test_features_of_power_two_are_exact_degree_two_attention():
    q, k, v = (torch.randn(1, 2, 150, 24, dtype=torch.float64) for _ in range(3))
    found = ops.linear_attention(q, k, v, power=2, causal=True, offset=1.0).output
    expected = ops.polynomial_attention(q, k, v, degree=2, offset=1.0, causal=True)
    assert relative_error(found, expected) < 1e-12


BACKENDS = ["reference", "chunked", *([] if why_unavailable() else ["native"])]


def halves_written_out(x: torch.Tensor) -> torch.Tensor:
    """(..., 2 r) -> (..., r^2): all products of the halves."""
    first, second = x.chunk(2, -1)
    return torch.einsum("...i, ...j -> ...ij", first, second).flatten(-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_factors_are_features_of_all_products(backend):
    """Output, denominator, the state and every gradient are those at power 1 of products that are written out."""
    case = Case(power=1, factors=2, local_chunk=0, decays=True, length=70, dtype=torch.float32)
    signs = torch.randn(20, generator=torch.Generator().manual_seed(0)).sign()  # a weight may be negative
    tensors = make(case).map(lambda x: x * signs if x.shape[-1] == 20 else x)
    found, expected = [], []
    for results, map_features, factors, name, double in (
        (found, lambda x: x, 2, backend, False),
        (expected, halves_written_out, 1, "reference", True),
    ):
        leaves = tensors.map(lambda x: (x.double() if double else x.clone()).requires_grad_())  # noqa: B023
        features = replace(leaves, query=map_features(leaves.query), key=map_features(leaves.key))
        result = run(replace(case, factors=factors), features, backend=name, return_state=True)
        loss = (result.output.square().sum() + result.denominator.square().sum()) + result.state.sums.square().sum()
        gradients_found = torch.autograd.grad(loss, list(leaves.leaves().values()))
        results += [result.output, result.denominator, result.state.sums, result.state.normalizer, *gradients_found]
    assert all(relative_error(a, b) < 2e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("local_chunk", [0, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_equal_factors_are_power_two(backend, local_chunk):
    squared = Case(power=2, local_chunk=local_chunk, decays=True, padded=True, length=65, dtype=torch.float32)
    tensors = make(squared)
    doubled = replace(tensors, query=tensors.query.repeat(1, 1, 1, 2), key=tensors.key.repeat(1, 1, 1, 2))
    found = run(replace(squared, power=1, factors=2), doubled, backend=backend)
    expected = run(squared, tensors, backend=backend)
    assert relative_error(found.output, expected.output) < 1e-5
    assert relative_error(found.denominator, expected.denominator) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case(padded=True), Case(local_chunk=0, normalize=False), Case(causal=False)], ids=str)
def test_the_denominator_is_the_offset_and_the_numerator_of_ones(case, backend):
    case = replace(case, dtype=torch.float32, offset=0.75)
    tensors = make(case)
    ones = replace(tensors, value=torch.ones_like(tensors.value))
    sums = run(replace(case, normalize=False), ones, backend=backend).output[..., 0]
    found = run(case, tensors, backend=backend).denominator
    real = torch.ones_like(found) if tensors.key_mask is None else (tensors.key_mask.cumsum(-1) > 0)[:, None]
    assert relative_error(found, (sums + 0.75) * real) < 1e-5


def test_a_row_without_mass_is_zero():
    case = Case(length=40, offset=0.0, padded=True)
    tensors = make(case)
    tensors.key_mask[:] = False
    found = gradients(case, tensors, "chunked")
    assert all(float(x.abs().max()) == 0 for x in found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decay_of_minus_infinity_forgets_all_before(backend):
    """Later rows are those of a sequence that begins there."""
    case = Case(local_chunk=0, decays=True, length=50, compute_chunk=16, dtype=torch.float32)
    tensors = make(case)
    tensors.log_decay[:, :, 20] = -torch.inf
    whole, rest = run(case, tensors, backend=backend).output, tensors.span(20, 50)
    assert relative_error(whole[:, :, 20:], run(case, rest, backend=backend).output) < 1e-5


def test_half_precision_stays_finite_in_both_directions():
    """Numerators before their division leave the range of float16."""
    case = Case(causal=False, local_chunk=16, length=65, dtype=torch.float16)
    tensors = make(case)
    large = replace(
        tensors, query=tensors.query * 30, local_query=tensors.local_query * 30**0.5, value=tensors.value + 5
    )
    expected = run(case, large.map(torch.Tensor.double), backend="reference").output
    found = run(case, large, backend="chunked").output
    assert found.dtype == torch.float16
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_a_short_row_does_not_pay_for_a_whole_chunk_in_both_directions(backend, monkeypatch):
    lengths = []

    def counted(inputs, plan, backend):
        lengths.append(inputs.query.shape[2])
        return real(inputs, plan, backend)

    real = blocks.run
    for module in (blocks, spans):
        monkeypatch.setattr(module, "run", counted)
    case = Case(causal=False, local_chunk=1024, length=20, dtype=torch.float32)
    run(case, make(case), backend=backend)
    assert lengths == [20]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_state_is_symmetric_whatever_its_cotangent(backend):
    """A state is read as the mean of x_a x_b and x_b x_a: what only moves one against the other changes nothing."""
    case = Case(length=20, history=37, dtype=torch.float32)
    state = run(case, make(case, case.history), backend="reference", return_state=True).state
    found = gradients(case, make(case), backend, state)
    for name in ("sums", "normalizer"):
        gradient = found[f"gradient of state {name}"]
        wide = gradient if gradient.dim() == 4 else gradient[..., None]
        symmetric = symmetrize(wide, case.features)
        torch.testing.assert_close(wide, symmetric, rtol=1e-4, atol=1e-6)
        assert symmetric.count_nonzero() > 100
