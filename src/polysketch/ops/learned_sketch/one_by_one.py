"""Several tensors through the same networks, by a backend that takes one of them at a time."""

from collections.abc import Callable

from torch import Tensor

from polysketch.ops.learned_sketch.networks import Networks

Forward = Callable[[Tensor, list[Tensor], Networks], Tensor]
Backward = Callable[[Tensor, Tensor, list[Tensor], Networks], tuple[Tensor, Tensor]]


def forward(of_one: Forward, inputs: list[Tensor], weights: list[Tensor], networks: Networks) -> list[Tensor]:
    """Features of each."""
    return [of_one(x, weights, networks) for x in inputs]


def backward(
    of_one: Backward, grads: list[Tensor], inputs: list[Tensor], weights: list[Tensor], networks: Networks
) -> list[Tensor]:
    """Gradients of each, and last those of the weights, which are added up."""
    found = [of_one(grad, x, weights, networks) for grad, x in zip(grads, inputs, strict=True)]
    total = found[0][1]
    for _, of_weights in found[1:]:
        total.add_(of_weights)
    return [*(grad_x for grad_x, _ in found), total]
