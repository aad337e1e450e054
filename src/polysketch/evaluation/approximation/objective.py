"""The squared error of features over all pairs of tokens, by Gram matrices in place of the matrix of their products."""

import torch
from torch import Tensor

__all__ = ["KernelLoss"]


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
