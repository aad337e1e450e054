"""The learned sketch by its definition (PolySketchFormer, Algorithm 2): plain PyTorch, the oracle of every backend.

Differentiable by autograd as often as wanted, in forward mode too. Hidden activations of all tokens exist at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.learned_sketch.activations import ACTIVATIONS
from polysketch.ops.learned_sketch.networks import TENSORS, Networks


def learned_sketch(x: Tensor, weights: list[Tensor], networks: Networks) -> Tensor:
    """phi(x), (batch, heads, length, r), where the maps share the heads of x evenly; arguments as of a backend."""
    maps = _parts(weights, networks.tensors)
    with without_autocast(x.device.type):
        parts = zip(x.chunk(len(maps), 1), maps, strict=True)
        return torch.cat([sketch(part, own, networks) for part, own in parts], 1)


def sketch(x: Tensor, weights: list[Tensor], networks: Networks) -> Tensor:
    """S(x): every level takes the values of the one before in pairs, sqrt(r) tanh(sqrt(1/r) f(a) * g(b))."""
    of_networks = _parts(weights, networks.depth * TENSORS)
    values = [x] * networks.leaves
    while len(values) > 1:
        outputs = [network(value, own, networks.activation) for value, own in zip(values, of_networks, strict=False)]
        of_networks, root = of_networks[len(values) :], outputs[0].shape[-1] ** 0.5
        values = [root * (left * right / root).tanh() for left, right in zip(outputs[::2], outputs[1::2], strict=True)]
    return values[0]


def network(x: Tensor, weights: list[Tensor], activation: str) -> Tensor:
    """f(x): LN -> up -> activation -> down, once for each stage; weights in the dtype of x."""
    for stage in _parts(weights, TENSORS):
        scale, bias, up, down = (weight.to(x.dtype) for weight in stage)
        normed = F.layer_norm(x, x.shape[-1:], scale, bias, 1e-5)
        x = ACTIVATIONS[activation].formula(normed @ up.mT) @ down.mT
    return x


def _parts(weights: list[Tensor], size: int) -> list[list[Tensor]]:
    return [weights[start : start + size] for start in range(0, len(weights), size)]
