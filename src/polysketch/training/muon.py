"""Muon: steps along orthogonalised matrices for the hidden layers, AdamW for all else, in one optimizer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.nn.joined_linear import JoinedLinear

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan 2024: the steepest start that keeps singular values near 1
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_ADAMW_SIZE = 0.2  # root of the mean square of AdamW's updates, as a share of the learning rate (Moonlight, 2.2)
_LEAST_SIDE = 32  # heads, of which some gates have one output each, are 20 at most in the presets


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024; Liu et al., arXiv 2502.16982, "Moonlight") for some matrices, AdamW for other parameters.

        M <- momentum M + (1 - momentum) G,    W <- (1 - r d) W - r 0.2 sqrt(max(rows, columns)) O(N)

    with G the gradient, r the learning rate, d the weight decay, N = momentum M + (1 - momentum) G (Nesterov), and
    O as in `orthogonalize`. The root of an update's mean square then is about 0.2 r, as AdamW's is: one learning rate
    and one weight decay serve both (Moonlight, section 2.2, for large models and long runs). A matrix that holds
    several is taken apart.

    `torch.optim.Muon` computes in bfloat16 everywhere, which most CPUs emulate slowly.

    Args:
        matrices: parameters of two axes -> the rows of each matrix in them, one after the other, see `muon_matrices`.
        others: parameter groups of AdamW; each parameter is in one place alone.
        learning_rate: rate of the first step, of all groups.
        betas: decay rates of AdamW's two running moments.
        weight_decay: of the matrices.
        momentum: decay rate of the running mean of the matrices' gradients.

    Memory: one number a weight of the matrices, where AdamW has two. Time: about
    5 (2 s^2 l + s^3) multiply-adds a step for a matrix with sides s <= l.
    """

    def __init__(
        self,
        matrices: Mapping[Tensor, Sequence[int]],
        others: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        self._adamw = torch.optim.AdamW([*others], learning_rate, betas, fused=True)
        own = {
            "params": list(matrices),
            "parts": list(matrices.values()),
            "lr": learning_rate,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
        super().__init__([own, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        own, *others = self.param_groups
        for weight, parts in zip(own["params"], own["parts"], strict=True):
            if weight.grad is not None:
                self._update(weight, weight.grad, parts, own)
        self._adamw.param_groups, self._adamw.state = others, self.state  # those of this optimizer, whoever set them
        self._adamw.step()

    def _update(self, weight: Tensor, gradient: Tensor, parts: Sequence[int], group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        direction = gradient.lerp(state["momentum"].lerp_(gradient, 1 - group["momentum"]), group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        for matrix, part in zip(weight.split(parts), direction.split(parts), strict=True):
            matrix.add_(orthogonalize(part), alpha=-group["lr"] * _ADAMW_SIZE * math.sqrt(max(matrix.shape)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """About U V^T of a matrix U S V^T, by five steps of Newton and Schulz (Jordan 2024).

        X <- 3.4445 X - 4.7750 (X X^T) X + 2.0315 (X X^T)^2 X,    X = matrix / |matrix| at first

    Singular values above a 500th of |matrix| (Frobenius) come to lie in 0.68 to 1.21, smaller ones below; zeros stay
    zeros. They are not made exactly 1, for that would take more steps and does not train better.

    Args:
        matrix: (rows, columns).

    Returns:
        Of the same shape; computed in bfloat16 on CUDA and in float32 elsewhere, and of that dtype.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x / x.norm().clamp(min=_LEAST_NORM)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT if tall else x


def muon_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The trained parameters that Muon is for, with the rows of each matrix in them.

    These are the weights of linear layers, of which all sides are at least 32: projections, gated linear units, the
    networks of a learned sketch. Smaller ones are little more than vectors, as gates with one output a head are. What
    belongs to an embedding is left out, also where it is the output layer. So is all that no `nn.Linear` holds:
    convolution filters, factors and projections by head, gates on heads.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    found = {linear.weight: _parts(linear) for linear in linears if linear.weight.requires_grad}
    return {
        weight: parts
        for weight, parts in found.items()
        if weight not in embeddings and min(*parts, weight.shape[1]) >= _LEAST_SIDE
    }


def _parts(linear: nn.Linear) -> tuple[int, ...]:
    return linear.parts if isinstance(linear, JoinedLinear) else (linear.out_features,)
