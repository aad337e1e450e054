"""`cross_entropy_`: for an output layer whose logits are made chunk by chunk, and gradients with them.

PyTorch's operations read and write the logits about ten times: for the bias, log-softmax, the loss, its gradient in
steps, the sum over rows and the rounding. The programs read them twice and write the gradient once.
"""

import torch
from torch import Tensor

from polysketch.ops.cross_entropy import reference, triton
from polysketch.ops.cross_entropy.self_check import programs_agree
from polysketch.ops.cross_entropy.types import CrossEntropy
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = ("triton",)
"""Beside the definition, "reference"."""


def cross_entropy_(
    logits: Tensor, bias: Tensor, targets: Tensor, divisor: Tensor, dtype: torch.dtype, *, backend: str = "auto"
) -> CrossEntropy:
    """-log softmax(logits + bias)[target] of every row, and gradients of their sum over `divisor`.

    For use within an operator that has a gradient: autograd sees nothing of it.

    Args:
        logits: (rows, vocab_size), float32 or float64, contiguous. They are used up: the definition adds the bias to
            them in place.
        bias: (vocab_size,), floating.
        targets: (rows,) int64; where it is `NO_TARGET` (-100) loss and gradient are 0.
        divisor: (), in the dtype of the logits.
        dtype: of the gradient of the logits.
        backend: "auto" (see `cross_entropy_backend`), "triton" or "reference" (the definition).

    Returns:
        Losses and gradients; losses and the gradient of the bias in the dtype of the logits.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: the backend that was asked for cannot run here, with the reason; or a target outside the
            vocabulary, by the definition: the programs make NaN of that row's loss and gradient.

    Cost: by the programs logits are read twice and the gradient is written once.
    """
    picked = cross_entropy_backend(logits, bias, dtype, backend)
    if picked == "reference" or (backend == "auto" and not programs_agree(cross_entropy_, logits, bias, dtype)):
        return reference.cross_entropy_(logits, bias, targets, divisor, dtype)
    return triton.cross_entropy(logits, bias, targets, divisor, dtype)


def cross_entropy_backend(logits: Tensor, bias: Tensor, dtype: torch.dtype, backend: str = "auto") -> str:
    """The backend that `cross_entropy_` runs for such tensors: by "auto" the programs on CUDA devices that can run
    them.

    Where they disagreed with the definition at their first call (`ops.triton.self_check`) the answer is "triton" all
    the same, and the call runs the definition.

    Raises:
        ValueError, RuntimeError: as `cross_entropy_`.
    """
    if backend == "auto":
        taken = logits.device.type in AUTO_DEVICES and triton.why_not(logits, bias, dtype) is None
        return "triton" if taken else "reference"
    if backend == "triton":
        reason = triton.why_not(logits, bias, dtype)
        if reason is not None:
            raise RuntimeError(reason)
    elif backend != "reference":
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', 'triton' or 'reference'")
    return backend
