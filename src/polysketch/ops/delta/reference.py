"""The definition of `delta_writes`: quadratic, plain PyTorch, differentiated by autograd; the oracle of the tests."""

import torch
from torch import Tensor

from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear.packing import expand, halves


def writes(inputs: Inputs, factors: int) -> Tensor:
    """u_j = s_j (v_j - sum over i < j of w_ji u_i): one system of equations, triangular, for all tokens."""
    key, value, strength, sums = inputs
    if sums is not None:
        value = value - expand(key, 1, factors, query=True) @ sums
    strength = strength[..., None]
    if key.shape[2] == 1:  # a token that is decoded
        return strength * value
    first, *second = (half @ half.mT for half in halves(key, factors))
    weights = first * second[0] if second else first
    system = torch.eye(key.shape[2], dtype=key.dtype, device=key.device) + (strength * weights).tril(-1)
    return torch.linalg.solve_triangular(system, strength * value, upper=False, unitriangular=True)
