"""Cross-entropy and its gradients as programs in Triton (`programs`).

Design, for N float32 logits and a gradient of s bytes a number:

    pass         bytes        a program
    forward      4 N          a row, block of columns by block
    gradient     (4 + s) N    a block of columns of some rows, and their sum

Bytes decide. The sums of a few rows each, a small share of N, are added up by PyTorch, in the same order every time.
Where the size of the vocabulary is no multiple of 4, logits are read and gradients written number by number.
"""

import torch
from torch import Tensor

from polysketch.ops import triton
from polysketch.ops.cross_entropy.types import CrossEntropy
from polysketch.ops.linear.triton.call import covering_block, num_blocks
from polysketch.ops.triton import configuration, launch

_MOST_ROWS = 2**30


def why_not(logits: Tensor, bias: Tensor, dtype: torch.dtype) -> str | None:
    """Why the programs cannot take a call with such tensors and gradients of this dtype; None where they can."""
    if logits.dtype != torch.float32 or torch.float64 in (bias.dtype, dtype):
        given = f"{logits.dtype}, {bias.dtype} and {dtype}"
        return f"the triton backend takes float32 logits, and no float64 bias or gradient, got {given}"
    if len(logits) >= _MOST_ROWS:
        return f"the triton backend takes fewer than 2^30 rows, got {len(logits):,}"
    if not logits.is_contiguous():
        return f"the triton backend takes contiguous logits, got strides {logits.stride()}"
    return triton.why_not(logits)


def cross_entropy(logits: Tensor, bias: Tensor, targets: Tensor, divisor: Tensor, dtype: torch.dtype) -> CrossEntropy:
    """Losses and gradients; arguments as `polysketch.ops.cross_entropy.cross_entropy_`, the logits stay as they are."""
    given = logits, bias.contiguous(), targets.contiguous(), divisor
    losses, *of_rows = _losses(*given)
    gradient = torch.empty_like(logits, dtype=dtype)
    return CrossEntropy(losses, gradient, _fill(gradient, *given, *of_rows))


def _losses(logits: Tensor, *given: Tensor) -> list[Tensor]:
    """Of rows, and what their gradient needs."""
    from polysketch.ops.cross_entropy.triton.programs.forward import cross_entropy

    rows, vocabulary = logits.shape
    found = [logits.new_empty(rows) for _ in range(3)]
    use = _configuration("cross_entropy", logits, vocabulary=vocabulary)
    launch(cross_entropy, rows, logits, *given, *found, configuration=use, VOCABULARY=vocabulary)
    return found


def _fill(gradient: Tensor, logits: Tensor, *given: Tensor) -> Tensor:
    """Write the gradient of the logits; that of the bias."""
    from polysketch.ops.cross_entropy.triton.programs.gradient import cross_entropy_gradient

    rows, vocabulary = logits.shape
    use = _configuration("cross_entropy_gradient", logits, vocabulary=vocabulary, bytes=gradient.element_size())
    parts = num_blocks(rows, use["ROWS"])
    sums = logits.new_empty(parts, vocabulary)
    programs = parts * num_blocks(vocabulary, use["BLOCK"])
    tensors = logits, *given, gradient, sums
    launch(cross_entropy_gradient, programs, *tensors, rows, configuration=use, VOCABULARY=vocabulary)
    return sums.sum(0)


def _configuration(program: str, logits: Tensor, **call: int) -> dict[str, int]:
    """That of the call, its block no larger than needed."""
    use = configuration(program, logits.device, **call)
    return {**use, "BLOCK": min(use["BLOCK"], covering_block(call["vocabulary"]))}
