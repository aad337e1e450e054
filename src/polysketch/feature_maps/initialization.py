"""The initialisation of every dense layer here."""

from torch import Tensor, nn

# Standard deviation of a unit normal cut at -2 and 2: dividing by it restores the variance asked for.
_TRUNCATED_STD = 0.87962566103423978


def lecun_normal_(weight: Tensor, fan_in: int, *, scale: float = 1.0) -> None:
    """Fill with a normal of variance scale^2 / fan_in, truncated at two standard deviations, in place.

    Args:
        weight: any shape.
        fan_in: number of inputs each output sums over.
        scale: factor on the standard deviation; 0 fills with zeros.

    Raises:
        ValueError: no inputs, numbers that are not real, or a scale that is negative or not finite.
    """
    if fan_in < 1 or not weight.is_floating_point():
        raise ValueError(
            f"expected a layer of at least one input and floating-point weights, found {fan_in} inputs, {weight.dtype}"
        )
    if not 0 <= scale < float("inf"):
        raise ValueError(f"expected a finite scale of at least 0, found {scale}")
    if scale == 0:  # a normal without deviation cannot be cut at two of them
        nn.init.zeros_(weight)
        return
    deviation = scale * fan_in**-0.5 / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
