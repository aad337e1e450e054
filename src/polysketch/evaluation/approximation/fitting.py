"""Train a feature map on queries and keys alone, to approximate a power of their products (LLOPS, section 4.3)."""

import math

import torch
from torch import Tensor

from polysketch.evaluation.approximation.weights import feature_weights, polynomial_weights, require_matrices
from polysketch.feature_maps import FeatureMap

__all__ = ["KernelLoss", "common_scale", "fit_feature_map"]

_WARM_UP = 20
_SMALLEST_SIZE = 0.02  # of a parameter, for its rate: biases begin at zero


def common_scale(query: Tensor, key: Tensor) -> Tensor:
    """The scale s at which products of query / s and key / s have a mean square of one; a scalar.

    Dividing both by it changes no relative error of a power, and lets maps of all kinds start near the right size.

    Args:
        query, key: (..., tokens, head_dim), of one number of tokens or of two.

    Raises:
        ValueError: fewer than two dimensions.
    """
    require_matrices(query=query, key=key)
    query, key = query.double().flatten(0, -2), key.double().flatten(0, -2)
    second_moments = [x.mT @ x / x.shape[0] for x in (query, key)]
    return (second_moments[0] * second_moments[1]).sum() ** 0.25


def fit_feature_map(
    feature_map: FeatureMap,
    query: Tensor,
    key: Tensor,
    *,
    degree: int,
    steps: int = 300,
    batch_size: int = 1024,
    learning_rate: float = 0.25,
    seed: int = 0,
) -> list[float]:
    """Train `feature_map` in place so that its weights approach (q . k)^degree: least squares over pairs.

    Every step takes `batch_size` queries and as many keys at random, and all pairs of them. Adam, whose rate for each
    parameter is `learning_rate` times its root mean square at the start, after a warm-up falling to zero as a cosine.
    Heads, where the map is one for all of them, are more tokens.

    Args:
        feature_map: with parameters, in the dtype and on the device of query; it starts from where it is.
        query: (tokens, head_dim).
        key: (tokens, head_dim); not necessarily as many.
        degree: p, of the target.
        steps, batch_size: at least 1; a batch is at most all tokens.
        learning_rate: relative to the size of the parameters.
        seed: of the batches.

    Returns:
        The loss of every step, relative to the batch's mean square: about the square of the relative Frobenius error.

    Raises:
        ValueError: a map without parameters, sizes below one, or a loss that is not finite.

    Cost: twice batch_size^2 num_features multiply-adds a step and those of the map; three times for squared products.
    """
    _check(feature_map, steps=steps, batch_size=batch_size, degree=degree)
    generator = torch.Generator().manual_seed(seed)
    groups = [{"params": [each], "lr": learning_rate * _size(each)} for each in feature_map.parameters()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_rate(step, steps))
    losses = []
    for _ in range(steps):
        queries, keys = (_sample(x, batch_size, generator)[None, None] for x in (query, key))
        exact = polynomial_weights(queries, keys, degree)
        loss = _loss(feature_map, queries, keys, exact)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if not math.isfinite(losses[-1]):
        raise ValueError(f"the fit diverged: its loss is {losses[-1]}; try a lower learning_rate than {learning_rate}")
    return losses


def _loss(feature_map: FeatureMap, query: Tensor, key: Tensor, exact: Tensor) -> Tensor:
    """By Gram matrices, but for maps whose products are squared or multiplied: those are no products of features."""
    if feature_map.power == feature_map.factors == 1:
        features = feature_map.map_queries(query), feature_map.map_keys(key)
        return KernelLoss.apply(*features, exact)
    return (feature_weights(feature_map, query, key) - exact).square().sum() / exact.square().sum()


def _share_of_rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _size(parameter: Tensor) -> float:
    return max(_SMALLEST_SIZE, float(parameter.detach().square().mean().sqrt()))


def _sample(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At random without replacement."""
    return x[torch.randperm(x.shape[0], generator=generator)[:count].to(x.device)]


def _check(feature_map: FeatureMap, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"expected {name} of at least 1, found {count}")
    if not any(True for _ in feature_map.parameters()):
        raise ValueError(f"{type(feature_map).__name__} has no parameters to fit")


class KernelLoss(torch.autograd.Function):
    """|phi_Q phi_K^T - A|_F^2 / |A|_F^2 from A, of all pairs: the loss of LLOPS (equation 6), relative.

        |phi_Q phi_K^T|^2 = <phi_Q^T phi_Q, phi_K^T phi_K>,    <phi_Q phi_K^T, A> = <phi_Q, A phi_K>

    Its gradient for phi_Q is 2 (phi_Q (phi_K^T phi_K) - A phi_K), for phi_K the same with Q and K, A and A^T exchanged,
    so that two products with A give the loss and all gradients, where the plain sum over pairs takes three and keeps
    two matrices of pairs. A is a constant here: it gets no gradient.

    `KernelLoss.apply(query_features, key_features, exact)`: (..., queries, m), (..., keys, m), (..., queries, keys) ->
    a scalar in their dtype. Where the features are near A the difference of large sums is left: in float32 losses below
    about 1e-6 are rounding. The gradients do not suffer from it.

    Cost: 2 queries keys m + 2 (queries + keys) m^2 multiply-adds, gradients included.
    """

    @staticmethod
    def forward(ctx, query_features: Tensor, key_features: Tensor, exact: Tensor) -> Tensor:
        """The loss; what the gradients need is kept, of the size of the features."""
        query_gram, key_gram = query_features.mT @ query_features, key_features.mT @ key_features
        query_target, key_target = exact @ key_features, exact.mT @ query_features
        total = exact.square().sum()
        ctx.save_for_backward(query_features @ key_gram - query_target, key_features @ query_gram - key_target, total)
        return ((query_gram * key_gram).sum() - 2 * (query_features * query_target).sum() + total) / total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of both features, by what forward has kept."""
        query_part, key_part, total = ctx.saved_tensors
        factor = 2 * grad / total
        return factor * query_part, factor * key_part, None
