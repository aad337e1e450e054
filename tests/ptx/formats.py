"""Numbers as registers hold them: raw bits of 1, 2, 4 or 8 bytes, read as the type that an instruction names.

bfloat16 is not a type of numpy: it is widened to float32 exactly, and rounded from float32 to nearest even.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_PLAIN = {f"{letter}{bits}": f"{sign}{bits // 8}" for bits in (8, 16, 32, 64) for letter, sign in ("bu", "uu", "si")}
TYPES: dict[str, np.dtype] = {
    **{name: np.dtype(code) for name, code in _PLAIN.items()},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    **{name: np.dtype(np.uint16) for name in ("bf16",)},
    **{name: np.dtype(np.uint32) for name in ("bf16x2", "f16x2", "u16x2", "s16x2", "tf32")},
    "pred": np.dtype(np.bool_),
}
"""How the bits of each type are read; those that numpy does not have stay unsigned."""
_TF32 = np.uint32(0xFFFF_E000)


def width(kind: str) -> int:
    """Bytes."""
    return TYPES[kind].itemsize


def raw(values: Array) -> Array:
    """The bits; of predicates, the predicates."""
    if values.dtype == np.bool_:
        return values
    return np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize])


def widened(bits: Array) -> Array:
    """bfloat16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(values: Array) -> Array:
    """float32 -> bfloat16, to nearest even; NaN is 0x7FFF, as PTX has it (`cvt`)."""
    bits = values.astype(np.float32).view(np.uint32)
    even = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    nearest = ((bits.astype(np.uint64) + even) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), nearest)


def as_tf32(bits: Array) -> Array:
    """What a product of tf32 operands sees of 32 bits: the lower 13 are not read."""
    return (bits & _TF32).view(np.float32)


def rounded_to_tf32(values: Array) -> Array:
    """float32 -> bits of tf32, to nearest, ties away from zero (`cvt.rna`)."""
    bits = values.view(np.uint32).astype(np.uint64) + np.uint64(0x1000)
    return bits.astype(np.uint32) & _TF32


def halves(bits: Array) -> tuple[Array, Array]:
    """The lower and the upper half of every number."""
    half = 4 * bits.dtype.itemsize
    kind = UNSIGNED[bits.dtype.itemsize // 2]
    return bits.astype(kind), (bits >> bits.dtype.type(half)).astype(kind)


def joined(lower: Array, upper: Array) -> Array:
    """The number with these halves."""
    kind = UNSIGNED[2 * lower.dtype.itemsize]
    return lower.astype(kind) | (upper.astype(kind) << kind(8 * lower.dtype.itemsize))


def floats(bits: Array, kind: str) -> list[Array]:
    """The floating-point numbers in raw bits of a type: one, or two of a packed type, the lower first."""
    if kind in ("bf16x2", "f16x2"):
        return [number for half in halves(bits) for number in floats(half, kind.removesuffix("x2"))]
    if kind == "bf16":
        return [widened(bits)]
    if kind == "tf32":
        return [as_tf32(bits)]
    return [bits.view(TYPES[kind])]


def bits_of(numbers: list[Array], kind: str) -> Array:
    """Raw bits of a type that hold these numbers, rounded to nearest even."""
    if kind in ("bf16x2", "f16x2"):
        lower, upper = (bits_of([number], kind.removesuffix("x2")) for number in numbers)
        return joined(lower, upper)
    (number,) = numbers
    return rounded(number.astype(np.float32)) if kind == "bf16" else raw(number.astype(TYPES[kind]))
