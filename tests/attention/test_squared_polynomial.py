"""Squared polynomials: the naive formula, the special cases, the linear form, and coefficients that are learned."""

import pytest
import torch
from torch import Tensor

from attention.cases import HEAD_DIM, HEADS, Case
from polysketch import attention

MIXED = (0.75, -1.125, 0.375)  # its square has coefficients of either sign


def case(kv_heads: int = HEADS, **options) -> Case:
    """Weights small enough that the 1 in the denominator counts."""
    return Case("squared-polynomial", options, kv_heads=kv_heads, norm_scale=0.3)


def naive(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], coefficients: list[float]) -> Tensor:
    """The formula, by all weights, as sum_r b_r s^r with b the coefficients of the square (section 4.3)."""
    query, key, value = mechanism.query_norm(inputs[0]), mechanism.key_norm(inputs[1]), inputs[2]
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    score = query @ key.mT
    weights = torch.zeros_like(score)
    for i, a in enumerate(coefficients):
        for j, b in enumerate(coefficients):
            weights = weights + a * b * score ** (i + j)
    weights = weights.tril()
    return weights @ value / (1 + weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_all_ones_are_the_naive_formula(degree: int, linear: bool):
    one = case(coefficients=degree, linear=linear)
    mechanism, inputs = one.build(), one.inputs()
    found = mechanism(*inputs[:3])
    torch.testing.assert_close(found, naive(mechanism, inputs, [1.0] * (degree + 1)), rtol=1e-10, atol=1e-10)
    assert mechanism(*inputs[:2], torch.ones_like(inputs[2])).mean() < 0.98


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("coefficients", [(1.0, 1.0), MIXED, (-3.0, 0.0, 0.5, 0.2)])
def test_the_linear_form_is_the_quadratic_one_to_rounding_with_its_gradients(
    coefficients: tuple[float, ...], causal: bool, kv_heads: int
):
    results = []
    for linear in (False, True):
        one = case(kv_heads, coefficients=coefficients, learned=True, linear=linear)
        mechanism, inputs = one.build(), [x.requires_grad_() for x in one.inputs()[:3]]
        output = mechanism(*inputs, causal=causal)
        leaves = dict(mechanism.named_parameters()) | dict(zip("qkv", inputs, strict=True))
        gradients = torch.autograd.grad(output.square().sum(), list(leaves.values()))
        results.append({"output": output.detach()} | dict(zip(leaves, gradients, strict=True)))
    assert results[0].keys() == results[1].keys()
    assert (results[0]["output"] != results[1]["output"]).any()  # two computations
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-9, atol=1e-10, msg=name)


def test_coefficients_of_either_sign_are_the_naive_formula():
    one = case(2, coefficients=MIXED)
    mechanism, inputs = one.build(), one.inputs()
    torch.testing.assert_close(mechanism(*inputs[:3]), naive(mechanism, inputs, list(MIXED)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("coefficients", "degree"), [((0, 1), 2), ((0, 0, 1), 4)])
def test_a_single_term_is_polynomial_attention(coefficients: tuple[int, ...], degree: int, linear: bool):
    one = case(coefficients=coefficients, linear=linear)
    mechanism, inputs = one.build(), one.inputs()
    polynomial = attention.build("polynomial", num_heads=HEADS, head_dim=HEAD_DIM, degree=degree).double()
    polynomial.load_state_dict({k: v for k, v in mechanism.state_dict().items() if "norm" in k})
    torch.testing.assert_close(mechanism(*inputs[:3]), polynomial(*inputs[:3]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("linear", [False, True])
def test_gradcheck_coefficients_included(linear: bool):
    one = case(2, coefficients=MIXED, learned=True, linear=linear)
    mechanism, inputs = one.build(), [x[:1, :, :5] for x in one.inputs()[:3]]

    def attend(query: Tensor, key: Tensor, value: Tensor, coefficients: Tensor) -> Tensor:
        return torch.func.functional_call(mechanism, {"coefficients": coefficients}, (query, key, value))

    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, mechanism.coefficients)]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_a_degree_means_ones_or_where_learned_draws_of_the_thesis_and_given_ones_are_kept():
    assert case(coefficients=4).build().coefficients.tolist() == [1.0] * 5
    learned = case(coefficients=6, learned=True)
    drawn = torch.cat([learned.build(seed=seed).coefficients.detach() for seed in range(60)])
    assert drawn.abs().max() <= 50
    assert 45 < drawn.max() < 50
    assert -50 < drawn.min() < -45
    assert abs(float(drawn.std()) - 50 / 3**0.5) < 4
    given = case(coefficients=MIXED, learned=True).build(dtype=torch.float32)
    torch.testing.assert_close(given.coefficients.detach(), torch.tensor(MIXED))
    from_json = attention.build("squared-polynomial", num_heads=2, head_dim=8, coefficients=[1.0, 2.0])
    assert from_json.coefficients.tolist() == [1.0, 2.0]


def test_only_learned_coefficients_are_parameters_and_a_fixed_one_takes_them_over():
    learned, fixed = case(coefficients=2, learned=True).build(), case(coefficients=2).build()
    assert "coefficients" in dict(learned.named_parameters())
    assert "coefficients" not in dict(fixed.named_parameters())
    fixed.load_state_dict(learned.state_dict())
    inputs = case().inputs()[:3]
    assert torch.equal(fixed(*inputs), learned(*inputs))


def test_a_step_of_training_moves_learned_coefficients_downhill():
    one = case(coefficients=2, learned=True)
    mechanism, inputs = one.build(), one.inputs()[:3]
    losses = []
    for _ in range(2):
        loss = mechanism(*inputs).square().sum()
        (gradient,) = torch.autograd.grad(loss, mechanism.coefficients)
        mechanism.coefficients.data.sub_(1e-2 * gradient / gradient.norm())
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]


def test_the_linear_form_has_a_state_that_does_not_grow_and_the_other_one_that_does():
    sizes = {}
    for linear in (False, True):
        one = case(coefficients=2, linear=linear)
        mechanism, (query, key, value, _) = one.build(), one.inputs(length=200)
        state = mechanism.init_state(2)
        sizes[linear] = []
        for start in range(0, 200, 100):
            span = slice(start, start + 100)
            mechanism.extend(query[:, :, span], key[:, :, span], value[:, :, span], state)
            sizes[linear].append(state.nbytes)
    assert sizes[True][0] == sizes[True][1]
    assert sizes[False][0] < sizes[False][1]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_near_full_precision(linear: bool, dtype: torch.dtype):
    one = case(coefficients=(1.0, 1.0, 1.0), linear=linear)
    exact, rounded = one.build(), one.build().to(dtype)
    exact.load_state_dict({key: tensor.double() for key, tensor in rounded.state_dict().items()})
    inputs = [x.to(dtype) for x in one.inputs()[:3]]
    expected, found = exact(*(x.double() for x in inputs)), rounded(*inputs)
    assert (found.double() - expected).norm() < 6 * torch.finfo(dtype).eps * expected.norm()


def test_the_representation_names_the_options():
    text = repr(case(coefficients=2, learned=True, linear=True).build())
    assert "coefficients=2, learned=True, linear=True" in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"coefficients": 0}, ValueError, r"coefficients \(where it is a degree\) must be at least 1, got 0"),
        ({"coefficients": 2.0}, TypeError, r"coefficients \(where it is a degree\) must be an integer, got 2.0"),
        ({"coefficients": (1.0,)}, ValueError, "coefficients must be at least two finite numbers"),
        ({"coefficients": (1.0, float("inf"))}, ValueError, "coefficients must be at least two finite numbers"),
        ({"coefficients": ("1", "2")}, TypeError, "coefficients must be numbers, got '1'"),
        ({"coefficients": "ones"}, TypeError, "must be an integer, got 'ones'"),
        ({"learned": 1}, TypeError, "learned must be True or False, got 1"),
        ({"linear": None}, TypeError, "linear must be True or False, got None"),
        ({"coefficients": 2, "linear": True}, ValueError, "head_dim 64 makes 2145 packed products of up to 2 entries"),
    ],
)
def test_bad_options_are_refused(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        attention.build("squared-polynomial", num_heads=2, head_dim=64, **options)
