"""Landmark attention against its formulas in float64, where it is exact, and what rows must not do to one another."""

import pytest
import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops.landmark import SAMPLE_RANGE, iterative_inverse

TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}
SAMPLES = torch.randint(SAMPLE_RANGE, (10,), generator=torch.Generator().manual_seed(3))


def tensors(length=37, batch=2, heads=4, key_heads=2, head_dim=8, value_dim=5, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, length, head_dim), (key_heads, length, head_dim), (key_heads, length, value_dim)]
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def repeated(query: Tensor, *others: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in others]


def nystrom(inputs: list[Tensor], landmarks: list[Tensor], iterations: int = 6) -> Tensor:
    """The formula; `landmarks` are segments of token indices."""
    query, (key, value) = inputs[0], repeated(*inputs)
    query, key = query / 8**0.25, key / 8**0.25
    means = [torch.stack([x[:, :, part].mean(2) for part in landmarks], 2) for x in (query, key)]
    first, matrix = (query @ means[1].mT).softmax(-1), (means[0] @ means[1].mT).softmax(-1)
    return first @ inverse_by_the_formula(matrix, iterations) @ (means[0] @ key.mT).softmax(-1) @ value


def inverse_by_the_formula(matrices: Tensor, iterations: int = 6) -> Tensor:
    """One matrix at a time."""
    eye, inverses = torch.eye(matrices.shape[-1], dtype=torch.float64), []
    for matrix in matrices.flatten(0, -3):
        z = matrix.T / (torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix, torch.inf))
        for _ in range(iterations):
            z = z @ (13 * eye - matrix @ z @ (15 * eye - matrix @ z @ (7 * eye - matrix @ z))) / 4
        inverses.append(z)
    return torch.stack(inverses).view_as(matrices)


def skyformer(inputs: list[Tensor], tokens: Tensor) -> Tensor:
    """The formula with an exact inverse; the first half of `tokens` are of queries, the others of keys."""
    query, (key, value) = inputs[0], repeated(*inputs)
    query, key = query / 8**0.25, key / 8**0.25
    half = len(tokens) // 2
    landmarks = torch.cat([query[:, :, tokens[:half]], key[:, :, tokens[half:]]], 2)
    kernel = lambda x, y: (-0.5 * (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)).exp()  # noqa: E731
    matrix = kernel(landmarks, landmarks) + 0.1 * torch.eye(len(tokens), dtype=torch.float64)
    return kernel(query, landmarks) @ torch.linalg.inv(matrix) @ kernel(landmarks, key) @ value


def test_nystrom_is_its_formula_also_where_segments_differ_in_size():
    inputs = tensors(11)
    segments = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]  # token t is in segment 4 t // 11
    output = ops.nystrom_attention(*inputs, num_landmarks=4)
    torch.testing.assert_close(output, nystrom(inputs, segments), **TOLERANCE)


@pytest.mark.parametrize("num_landmarks", [37, 38, 500])
def test_nystrom_with_as_many_landmarks_as_tokens_is_softmax(num_landmarks):
    inputs = tensors()
    exact = ops.softmax_attention(*inputs)
    errors = [
        (ops.nystrom_attention(*inputs, num_landmarks=num_landmarks, iterations=n) - exact).norm() / exact.norm()
        for n in (3, 6, 30)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.5
    assert errors[2] < 1e-8


@pytest.mark.parametrize(
    "attend",
    [
        lambda *x, **k: ops.nystrom_attention(*x, num_landmarks=9, **k),
        lambda *x, **k: ops.skyformer_attention(*x, samples=SAMPLES, **k),
    ],
)
@pytest.mark.parametrize("kept", [5, 20, 30])
def test_padding_anywhere_is_as_if_it_were_not_there(attend, kept):
    inputs = tensors()
    real = torch.randperm(37, generator=torch.Generator().manual_seed(kept))[:kept].sort().values
    mask = (torch.arange(37)[:, None] == real).any(1).expand(2, -1)
    poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    expected = attend(*(x[:, :, real] for x in inputs))
    torch.testing.assert_close(attend(*poisoned, key_mask=mask)[:, :, real], expected, **TOLERANCE)


@pytest.mark.parametrize(
    "attend",
    [
        lambda *x, **k: ops.nystrom_attention(*x, num_landmarks=9, **k),
        lambda *x, **k: ops.skyformer_attention(*x, samples=SAMPLES, **k),
    ],
)
def test_a_row_without_a_token_is_zero_and_has_finite_gradients(attend):
    inputs = [x.requires_grad_() for x in tensors()]
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0] = False
    output = attend(*inputs, key_mask=mask)
    assert not output[0].any()
    assert output[1].abs().min() > 0
    for gradient in torch.autograd.grad(output.square().sum(), inputs):
        assert gradient.isfinite().all()


def test_the_scale_of_the_inverse_is_that_of_each_matrix_so_rows_do_not_change_one_another():
    query, key, value = tensors()
    key = key * torch.tensor([1.0, 6.0])[:, None, None, None]  # the second row's weights are far more peaked
    both = ops.nystrom_attention(query, key, value, num_landmarks=9, iterations=4)
    for row in range(2):
        alone = ops.nystrom_attention(*(x[row : row + 1] for x in (query, key, value)), num_landmarks=9, iterations=4)
        torch.testing.assert_close(both[row : row + 1], alone, **TOLERANCE)


def test_the_iteration_comes_to_the_inverse():
    matrix = torch.randn(3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    torch.testing.assert_close(iterative_inverse(matrix), inverse_by_the_formula(matrix), **TOLERANCE)
    torch.testing.assert_close(iterative_inverse(matrix, 40), torch.linalg.inv(matrix), rtol=1e-6, atol=1e-6)


def test_skyformer_is_its_formula():
    inputs = tensors()
    output = ops.skyformer_attention(*inputs, samples=SAMPLES, iterations=20)
    torch.testing.assert_close(output, skyformer(inputs, SAMPLES * 37 // SAMPLE_RANGE), **TOLERANCE)
    six = ops.skyformer_attention(*inputs, samples=SAMPLES)
    assert 0 < (six - output).norm() < 0.02 * output.norm()


def test_more_landmarks_bring_skyformer_nearer_to_its_kernel():
    query, key, value = tensors(key_heads=4)
    distance = torch.cdist(query / 8**0.25, key / 8**0.25)
    exact = (-0.5 * distance.square()).exp() @ value
    every = torch.arange(37) * SAMPLE_RANGE // 37 + 1
    errors = []
    for samples in (SAMPLES, torch.cat([every, every])):
        output = ops.skyformer_attention(query, key, value, samples=samples, regularization=1e-4, iterations=40)
        errors.append((output - exact).norm() / exact.norm())
    assert errors[0] > 0.1
    assert errors[1] < 1e-3


def test_skyformer_draws_landmarks_from_all_of_a_row():
    query, key, value = (x.requires_grad_() for x in tensors(5))
    samples = torch.tensor([0, SAMPLE_RANGE - 1, 0, SAMPLE_RANGE - 1])
    output = ops.skyformer_attention(query, key, value, samples=samples, iterations=20)
    torch.testing.assert_close(output, skyformer([query, key, value], torch.tensor([0, 4, 0, 4])), **TOLERANCE)


def test_half_precision_is_computed_in_single():
    inputs = [x.bfloat16() for x in tensors()]
    for attend in (
        lambda *x: ops.nystrom_attention(*x, num_landmarks=9),
        lambda *x: ops.skyformer_attention(*x, samples=SAMPLES),
    ):
        output, exact = attend(*inputs), attend(*(x.double() for x in inputs))
        assert output.dtype == torch.bfloat16
        assert (output.double() - exact).norm() < 0.005 * exact.norm()


def test_what_does_not_fit_is_refused_in_one_line():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="num_landmarks must be at least 1, got 0"):
        ops.nystrom_attention(query, key, value, num_landmarks=0)
    with pytest.raises(ValueError, match="num_landmarks must be at least 1, got 0"):
        ops.skyformer_attention(query, key, value, samples=SAMPLES[:0])
    with pytest.raises(ValueError, match="of the same tokens, got 5 queries and 37 keys"):
        ops.nystrom_attention(query[:, :, :5], key, value, num_landmarks=3)


@pytest.mark.parametrize("samples", [[0, -1], [0, SAMPLE_RANGE], [0.0, 0.5], 3])
def test_samples_that_are_no_ranks_are_refused(samples):
    query, key, value = tensors()
    with pytest.raises(ValueError, match="samples must be"):
        ops.skyformer_attention(query, key, value, samples=torch.tensor(samples))


def test_no_query_heads_are_refused():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="query heads"):
        ops.nystrom_attention(query[:, :0], key, value, num_landmarks=3)
