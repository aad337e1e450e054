"""Numbers in registers: integers, floating point, comparisons, bits and conversions.

A sum, a product, a quotient or a root of bfloat16 is computed in float32 and rounded once more, which gives the
correctly rounded result; `fma` is computed in float64, and may differ from it in the last place. What a device
approximates (`ex2.approx` and others) is exact here. Source: PTX ISA, "Instruction Set".
"""

from collections.abc import Callable

import numpy as np

from ptx.blocks import Blocks, implements
from ptx.formats import TYPES, Array, bits_of, floats, halves, joined, raw, rounded_to_tf32, width
from ptx.parsing import Fault, Instruction, registers_of

_FLOATING = ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2")
_OF_FLOATS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.fmax,  # a number beside NaN is the result, without the word NaN in the opcode
    "min": np.fmin,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "neg": np.negative,
    "abs": np.abs,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}
_OF_INTEGERS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
_ROUNDINGS = "rn approx full ftz"


@implements("fma rcp sqrt rsqrt ex2 lg2 tanh", _ROUNDINGS)
def _floating_alone(blocks: Blocks, step: Instruction) -> None:
    _floating(blocks, step)


@implements("add sub neg abs max min", f"{_ROUNDINGS} NaN")
def _either(blocks: Blocks, step: Instruction) -> None:
    _floating(blocks, step) if step.kind in _FLOATING else _integer(blocks, step)


@implements("and or xor not")
def _bitwise(blocks: Blocks, step: Instruction) -> None:
    _integer(blocks, step)


def _floating(blocks: Blocks, step: Instruction) -> None:
    function = _OF_FLOATS[step.name]
    if "NaN" in step.parts:
        function = {"max": np.maximum, "min": np.minimum}[step.name]
    given = [floats(blocks.read_bits(operand, step.kind), step.kind) for operand in step.operands[1:]]
    found = [function(*numbers) for numbers in zip(*given, strict=True)]
    blocks.write(step.operands[0], bits_of(found, step.kind))


def _integer(blocks: Blocks, step: Instruction) -> None:
    function = _OF_INTEGERS[step.name]
    if step.kind in ("u16x2", "s16x2"):
        return _packed_integers(blocks, step, function)
    given = [blocks.read(operand, step.kind) for operand in step.operands[1:]]
    return blocks.write(step.operands[0], function(*given))


def _packed_integers(blocks: Blocks, step: Instruction, function: Callable[..., Array]) -> None:
    """Of the lower halves and of the upper halves."""
    given = [halves(blocks.read_bits(operand, "b32")) for operand in step.operands[1:]]
    kind = TYPES[step.kind.removesuffix("x2")]
    lower, upper = (function(*(half.view(kind) for half in some)) for some in zip(*given, strict=True))
    blocks.write(step.operands[0], joined(raw(lower), raw(upper)))


@implements("mul mad", f"lo hi wide {_ROUNDINGS}")
def _multiply(blocks: Blocks, step: Instruction) -> None:
    """Of integers the lower half, the upper half or the whole of the product; `mad` adds a third operand to it."""
    if step.kind in _FLOATING:
        return _floating(blocks, step)
    first, second = (blocks.read(operand, step.kind) for operand in step.operands[1:3])
    found, kind = _product(first, second, step)
    more = blocks.read(step.operands[3], kind) if step.name == "mad" else _zero(kind)
    return blocks.write(step.operands[0], found + more)


def _zero(kind: str) -> Array:
    """Nothing, of a type."""
    return np.zeros((), TYPES[kind])


def _product(first: Array, second: Array, step: Instruction) -> tuple[Array, str]:
    """The product as the opcode asks for it, and its type."""
    size = width(step.kind)
    if "lo" in step.parts:
        return first * second, step.kind
    if size == 8:
        exact = first.astype(object) * second.astype(object)
        return (exact >> 64).astype(first.dtype), step.kind
    twice = f"{step.kind[0]}{16 * size}"
    whole = first.astype(TYPES[twice]) * second.astype(TYPES[twice])
    if "wide" in step.parts:
        return whole, twice
    return (whole >> TYPES[twice].type(8 * size)).astype(first.dtype), step.kind


@implements("div rem", _ROUNDINGS)
def _divide(blocks: Blocks, step: Instruction) -> None:
    """Integers are divided toward zero; by zero there is no result, and all bits are set."""
    if step.kind in _FLOATING:
        return _floating(blocks, step)
    first, second = (blocks.read(operand, step.kind) for operand in step.operands[1:])
    some = np.where(second == 0, second.dtype.type(1), second)
    remainder = np.fmod(first, some)
    found = remainder if step.name == "rem" else (first - remainder) // some
    blocks.write(step.operands[0], np.where(second == 0, np.invert(_zero(step.kind)), found))
    return None


@implements("shl shr")
def _shift(blocks: Blocks, step: Instruction) -> None:
    """A shift by all bits or more leaves nothing; one of negative numbers to the right leaves the sign."""
    values, by = blocks.read(step.operands[1], step.kind), blocks.read(step.operands[2], "u32")
    bits = 8 * values.dtype.itemsize
    shift = np.left_shift if step.name == "shl" else np.right_shift
    signed = step.name == "shr" and values.dtype.kind == "i"
    found = shift(values, np.minimum(by, bits - 1).astype(values.dtype))
    blocks.write(step.operands[0], found if signed else np.where(by >= bits, values.dtype.type(0), found))


@implements("bfe")
def _extract(blocks: Blocks, step: Instruction) -> None:
    """Bits from a position on, with their sign for signed types."""
    values = blocks.read(step.operands[1], step.kind)
    position, length = (int(operand, 0) for operand in step.operands[2:])
    bits = values.dtype.itemsize * 8
    if not 0 < length <= bits - position:
        raise Fault(f"bfe of {length} bits at {position}")
    up, down = (values.dtype.type(number) for number in (bits - position - length, bits - length))
    blocks.write(step.operands[0], (values << up) >> down)


@implements("bfi")
def _insert(blocks: Blocks, step: Instruction) -> None:
    """Bits of the first operand at a position of the second."""
    bits, into = (blocks.read_bits(operand, step.kind) for operand in step.operands[1:3])
    position, length = (int(operand, 0) for operand in step.operands[3:])
    kind = into.dtype.type
    mask = kind(((1 << length) - 1) << position)
    blocks.write(step.operands[0], (into & ~mask) | ((bits << kind(position)) & mask))


@implements("prmt")
def _permute(blocks: Blocks, step: Instruction) -> None:
    """Four of the eight bytes of two numbers, each chosen by four bits, whose highest repeats the byte's sign."""
    first, second, choice = (blocks.read_bits(operand, "b32") for operand in step.operands[1:])
    given = np.concatenate([x[:, None].view(np.uint8).reshape(-1, 4) for x in (first, second)], 1)
    fields = (choice[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & np.uint32(15)
    found = np.take_along_axis(given, (fields & 7).astype(np.int64), 1)
    sign = np.where(found & 0x80, np.uint8(0xFF), np.uint8(0))
    found = np.where(fields & 8, sign, found).astype(np.uint8)
    blocks.write(step.operands[0], np.ascontiguousarray(found).view(np.uint32)[:, 0])


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_MORE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@implements("setp", " ".join([*_COMPARISONS, *_UNORDERED, "num nan ftz", *_MORE]))
def _compare(blocks: Blocks, step: Instruction) -> None:
    """A comparison, combined with a predicate where the opcode says so; with NaN false, but for unordered ones."""
    if "|" in step.operands[0]:
        raise Fault("this executor does not know setp with two results")
    bits = [blocks.read_bits(operand, step.kind) for operand in step.operands[1:3]]
    values = [floats(x, step.kind)[0] if step.kind in _FLOATING else x.view(TYPES[step.kind]) for x in bits]
    found = _compared(step.parts[1], *values)
    for word in step.parts[2:]:
        if word in _MORE:
            found = _MORE[word](found, blocks.read(step.operands[3], "pred"))
    blocks.write(step.operands[0], found)


def _compared(word: str, first: Array, second: Array) -> Array:
    if word in _COMPARISONS and first.dtype.kind != "f":
        return _COMPARISONS[word](first, second)
    unordered = np.isnan(first) | np.isnan(second)
    if word in ("num", "nan"):
        return unordered if word == "nan" else ~unordered
    if word in _UNORDERED:
        return _COMPARISONS[_UNORDERED[word]](first, second) | unordered
    return _COMPARISONS[word](first, second) & ~unordered


@implements("selp")
def _select(blocks: Blocks, step: Instruction) -> None:
    first, second = (blocks.read_bits(operand, step.kind) for operand in step.operands[1:3])
    blocks.write(step.operands[0], np.where(blocks.read(step.operands[3], "pred"), first, second))


@implements("mov")
def _move(blocks: Blocks, step: Instruction) -> None:
    """A copy; or a number out of two halves in braces, or into them."""
    target, source = step.operands
    if source[0] == "{":
        lower, upper = (blocks.read_bits(each, _half(step.kind)) for each in registers_of(source))
        return blocks.write(target, joined(lower, upper))
    values = blocks.read_bits(source, step.kind) if step.kind != "pred" else blocks.read(source, "pred")
    if target[0] == "{":
        for register, half in zip(registers_of(target), halves(values), strict=True):
            blocks.write(register, half)
        return None
    return blocks.write(target, values)


def _half(kind: str) -> str:
    return f"b{4 * width(kind)}"


@implements("cvt", "rn rna rz rni rzi ftz satfinite")
def _convert(blocks: Blocks, step: Instruction) -> None:
    """Between types; two float32 into one packed number, the first operand in the upper half."""
    target, source = (part for part in step.parts[1:] if part in TYPES)
    given = [blocks.read_bits(operand, source) for operand in step.operands[1:]]
    if target == "tf32":
        return blocks.write(step.operands[0], _to_tf32(step, given[0]))
    if target in _FLOATING:
        numbers = [_number(bits, source) for bits in reversed(given)]
        return blocks.write(step.operands[0], bits_of(numbers, target))
    return blocks.write(step.operands[0], _to_integer(step, given[0], source, target))


def _to_tf32(step: Instruction, bits: Array) -> Array:
    if "rna" not in step.parts:
        raise Fault("this executor knows cvt to tf32 with rna alone")
    return rounded_to_tf32(bits.view(np.float32))


def _number(bits: Array, kind: str) -> Array:
    return floats(bits, kind)[0] if kind in _FLOATING else bits.view(TYPES[kind])


def _to_integer(step: Instruction, bits: Array, source: str, target: str) -> Array:
    """Out of an integer its lower bits or an extension by its sign; out of a floating-point number the nearest."""
    number = _number(bits, source)
    if number.dtype.kind != "f":
        return number.astype(TYPES[target])
    whole = np.rint(number) if "rni" in step.parts else np.trunc(number)
    limits = np.iinfo(TYPES[target])
    return np.nan_to_num(np.clip(whole.astype(np.float64), limits.min, limits.max)).astype(TYPES[target])
