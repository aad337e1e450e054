"""What `make bench` wants on a CPU, each with the reason that is printed where it is missed.

Reasons are those of docs/performance.md and performance-gpu.md. Where it has none, the reason is that nobody found out.
"""

from benchmarks.figures import NOT_FOUND_OUT, Target

FEW_HEADS = 4
"""Where every mechanism is timed."""

WHERE = {"mechanisms": f", {FEW_HEADS} heads", "hyper": ", 1 head", "bfloat16": " in bfloat16"}
"""What a section's figures say besides what is timed."""

_REST_OF_THE_MODEL = (
    "the rest of the model, which no attention makes faster: its operations alone allow 1.9 times at 8,192 tokens and "
    "3.1 at 16,384"
)
_BLOCKS_AT_16K = "its exact blocks of 4,096 tokens alone take 0.29 of SDPA's time by SDPA's own program"
_BLOCKS_AT_131K = "its exact blocks of 4,096 tokens and the levels above them allow 17 at most"
_BFLOAT16 = (
    "without AMX products are made in float32, whose floor is 4.2; with it they are three to four times as fast, and "
    "the rest of a call decides"
)
_LLOPS = "it reaches 75 % of its floor; at the floor it would have 7.1"
_SLOW_FOR_ALL = (
    "it is exact: as much work as SDPA's, and as fast within the noise of a run (squared-polynomial had 0.99 and 1.1)"
)

_OPERATIONS = "most of a token is the begin of hundreds of operations of PyTorch"


def _least(why: str, wanted: dict[int, float]) -> dict[int, Target]:
    return {place: Target(at_least=value, why=why) for place, value in wanted.items()}


def _most(wanted: dict[int, float]) -> dict[int, Target]:
    return {place: Target(at_most=value, why=NOT_FOUND_OUT) for place, value in wanted.items()}


SPEEDS = {
    ("forward", "features given"): _least(NOT_FOUND_OUT, {2_048: 1.0, 16_384: 7.0, 32_768: 14.0}),
    ("forward", "learned sketch"): _least(NOT_FOUND_OUT, {16_384: 2.3, 32_768: 4.5}),
    ("forward+backward", "features given"): _least(NOT_FOUND_OUT, {8_192: 3.5, 16_384: 7.0}),
    ("training step of mini", "learned"): _least(NOT_FOUND_OUT, {8_192: 1.2, 16_384: 1.8}),
    ("training step of mini", "random"): _least(_REST_OF_THE_MODEL, {8_192: 2.0, 16_384: 2.9}),
    ("decoding with tiny", "learned"): _least(_OPERATIONS, {8_192: 1.0, 32_768: 3.0}),
    ("decoding with mini", "learned"): _least(_OPERATIONS, {8_192: 1.0, 32_768: 3.0}),
    ("decoding with tiny", "polysketch/2"): _least(_OPERATIONS, {8_192: 1.35, 32_768: 3.5}),
    ("decoding with mini", "polysketch/2"): _least(_OPERATIONS, {8_192: 1.35, 32_768: 3.5}),
    (f"forward{WHERE['mechanisms']}", "hyper"): _least(_BLOCKS_AT_16K, {16_384: 4.0}),
    (f"forward{WHERE['mechanisms']}", "llops"): _least(_LLOPS, {16_384: 6.0}),
    (f"forward{WHERE['hyper']}", "hyper"): _least(_BLOCKS_AT_131K, {131_072: 20.0}),
    (f"forward{WHERE['bfloat16']}", "learned sketch"): _least(_BFLOAT16, {16_384: 6.0}),
}
"""Direction and series -> length or position -> times as fast as the baseline."""

GIGABYTES = {
    ("forward", "features given"): _most({32_768: 0.1}),
    ("forward", "learned sketch"): _most({32_768: 1.0}),
    ("forward+backward", "features given"): _most({16_384: 0.25}),
    ("forward+backward", "learned sketch"): _most({16_384: 0.5}),
    ("training step of mini", "learned"): _most({16_384: 4.0}),
    (f"forward{WHERE['mechanisms']}", "performer"): _most({16_384: 0.15}),
    (f"forward{WHERE['mechanisms']}", "polarity"): _most({16_384: 0.15}),
}
"""The same -> memory, of attention beyond inputs, outputs and gradients, of a step that of the whole process."""

DOUBLING = Target(at_most=2.2, why=NOT_FOUND_OUT)
HEAVY = Target(at_most=1.6, why="at the bound: other runs had 1.5, 1.56 and 1.7")
STEADY = Target(at_least=0.9, at_most=1.1, why=NOT_FOUND_OUT)
FOLD = Target(at_most=5.0, why=NOT_FOUND_OUT)
SAME_STATE = Target(at_least=1, at_most=1, why=NOT_FOUND_OUT)

FLOOR_PERCENT = Target(
    at_least=70,
    why="the floor counts products with the sums alone: those inside chunks, reading and writing tensors, and "
    "normalizers come on top",
)
ONNX_RUNTIME = Target(at_least=2.0, why=NOT_FOUND_OUT)

BREAK_EVEN = Target(
    at_most=1_500,
    why="without AMX products are made in float32; with it they are three to four times as fast, and the rest of a "
    "call decides: 1.1 times as fast in all",
)
BFLOAT16_STEP = Target(
    at_least=1.6,
    why="without AMX products of attention are made in float32; with it attention gains 1.08 times with backward, for "
    "the rest of a call decides; of the rest of the model not found out",
)


def slowest(mechanism: str) -> Target:
    """Of the slowest mechanism against SDPA: why depends on which one it is."""
    exact = mechanism in ("softmax", "polynomial", "squared-polynomial")
    return Target(at_least=1.0, why=_SLOW_FOR_ALL if exact else NOT_FOUND_OUT)
