"""The learned sketch by its definition (PolySketchFormer, Algorithm 2): plain PyTorch, the oracle of every backend.

Differentiable by autograd as often as wanted, in forward mode too. Hidden activations of all tokens exist at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.learned_sketch.weights import TENSORS, networks_of_a_map


def learned_sketch(x: Tensor, weights: list[Tensor], leaves: int) -> Tensor:
    """phi(x), (batch, heads, length, r), where the maps share the heads of x evenly; arguments as of the op."""
    networks = [weights[start : start + TENSORS] for start in range(0, len(weights), TENSORS)]
    size = networks_of_a_map(leaves)
    maps = [networks[start : start + size] for start in range(0, len(networks), size)]
    with torch.autocast(x.device.type, enabled=False):
        return torch.cat([sketch(part, of_map) for part, of_map in zip(x.chunk(len(maps), 1), maps, strict=True)], 1)


def sketch(x: Tensor, networks: list[list[Tensor]]) -> Tensor:
    """S(x): every level takes the values of the one before in pairs, sqrt(r) tanh(sqrt(1/r) f(a) * g(b))."""
    values = [x] * (len(networks) // 2 + 1)
    while len(values) > 1:
        outputs = [network(value, own) for value, own in zip(values, networks, strict=False)]
        networks, root = networks[len(values) :], outputs[0].shape[-1] ** 0.5
        values = [root * (left * right / root).tanh() for left, right in zip(outputs[::2], outputs[1::2], strict=True)]
    return values[0]


def network(x: Tensor, weights: list[Tensor]) -> Tensor:
    """f(x) = LN -> up -> GELU -> down, twice; weights in the dtype of x."""
    for half in (weights[:4], weights[4:]):
        scale, bias, up, down = (weight.to(x.dtype) for weight in half)
        x = F.gelu(F.layer_norm(x, x.shape[-1:], scale, bias, 1e-5) @ up.mT, approximate="tanh") @ down.mT
    return x
