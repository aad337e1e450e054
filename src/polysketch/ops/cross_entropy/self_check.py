"""A few rows of logits by the programs and by the definition."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from polysketch.ops.cross_entropy.types import CrossEntropy
from polysketch.ops.triton import self_check
from polysketch.targets import NO_TARGET

_ROWS = 5
_DIVISOR = 0.1  # so that gradients are as large as losses, and either is seen

Op = Callable[..., CrossEntropy]


def programs_agree(op: Op, logits: Tensor, bias: Tensor, dtype: torch.dtype) -> bool:
    """Whether the programs may be taken for a vocabulary and dtypes like these; see `ops.triton.self_check`.

    Args:
        op: `cross_entropy_`.
        logits, bias, dtype: of the call.
    """
    like = logits.new_empty(0, dtype=dtype)  # the least precise of what is compared
    call = {"vocabulary": len(bias), "bias": str(bias.dtype).removeprefix("torch.")}
    return self_check.passed("cross_entropy", like, call, partial(_errors, op, bias.dtype, len(bias), like))


def _errors(op: Op, bias: torch.dtype, vocabulary: int, like: Tensor, _backward: bool) -> dict[str, float]:
    drawn = self_check.random_inputs(logits=(_ROWS, vocabulary), bias=(vocabulary,))
    targets = torch.arange(_ROWS, device=like.device) * (vocabulary - 1) // (_ROWS - 1)  # the ends among them
    targets[1] = NO_TARGET

    def side_by_side(backend: str, **given: Tensor) -> Tensor:
        """Losses and both gradients."""
        logits = given["logits"].to(torch.promote_types(given["logits"].dtype, torch.float32))
        found = op(
            *(logits, given["bias"].to(bias) if backend == "triton" else given["bias"], targets),
            *(logits.new_tensor(_DIVISOR), given["logits"].dtype),
            backend=backend,
        )
        return torch.cat([each.flatten().to(logits.dtype) for each in found])

    programs, definition = (partial(side_by_side, backend) for backend in ("triton", "reference"))
    return self_check.disagreements(programs, definition, drawn, like, backward=False)
