"""What `campaigns.numbers` attends to: a mechanism or an op with options, sizes and inputs, all drawn from one seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polysketch import attention, ops

OP = "linear attention"
NAMES = (*attention.MECHANISMS, *[OP] * 5)
HIDDEN = 5
_RESOLUTION = 2.0**-12
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Where the choice of keys jumps with the last digit, two precisions compute two functions.
JUMPS = ("hyper", "polysketch-heavy")

# Values of options by name, whichever mechanism takes them; what does not go together is drawn again.
_VALUES: dict[str, tuple[Any, ...]] = {
    "chunk_size": (3, 16),
    "coefficients": (1, 2, (0.7, -1.1, 0.4)),
    "convolution_size": (1, 3, 5),
    "decay_gate": (False, True),
    "degree": (2, 4),
    "far_bias": (-3.0, 0.0, 3.0),
    "feature_dim": (1, 4, 16),
    "features": ("codes", "learned", "random"),
    "focus": (2.0, 3.0),
    "hash_bits": (1, 3),
    "heavy_size": (2, 16),
    "kind": ("elu", "relu", "squared-relu", "softmax"),
    "learned": (True, False),
    "linear": (True, False),
    "local_chunk": (None, 1, 4, 16, 33),
    "min_length": (2, 8, 64),
    "nonnegative": (True, False),
    "normalize": (True, False),
    "num_features": (16, 40),
    "num_landmarks": (1, 4, 16),
    "output_gate": (True, False),
    "prefix_gain": (None, 0.5),
    "projection": ("gaussian", "srht"),
    "rank": (1, 2),
    "sample_size": (2, 1000),
    "sampling": ("uniform", "norm"),
    "share": ("layer", "head"),
    "sketch_size": (3, 4, 8),  # a norm of two numbers is their sign
    "window": (1, 2, 7, 16, 64),
}
_LENGTHS = (1, 2, 3, 7, 8, 9, 16, 31, 33, 40, 64, 65, 100, 130)


@dataclass
class Drawn:
    """One case.

    Attributes:
        name: of a mechanism, or `OP`.
        options: of it.
        module: in float64, its parameters rounded to `dtype`.
        causal: the direction.
        dtype: that it is to be computed in.
        lengths: real tokens of each row.
        inputs: query, key, value and hidden, or for the op query and key features, value and log decay; padding holds
            zeros.
        garbage: what is to stand at padding.
        before: whether padding stands before a row's tokens, not behind.
        cuts: where decoding splits a row.
        layout: of the tensors in memory.
        backend: of the op.
    """

    name: str
    options: dict[str, Any]
    module: nn.Module
    causal: bool
    dtype: torch.dtype
    lengths: list[int]
    inputs: list[Tensor]
    garbage: float
    before: bool
    cuts: list[int]
    layout: str
    backend: str = "auto"
    scale: str = ""
    heads: tuple[int, int, int, int] = field(default=(1, 1, 1, 1))

    def __str__(self) -> str:
        direction = "causal" if self.causal else "bidirectional"
        sizes = "heads {}/{} of {} and {}".format(*self.heads)
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        where = f" {self.backend}" if self.name == OP else ""
        return (
            f"{self.name}{where} {options} {direction} {self.dtype} {sizes} lengths {self.lengths} {self.scale} "
            f"garbage {self.garbage} {'before' if self.before else 'behind'} cuts {self.cuts} {self.layout}"
        )

    @property
    def real(self) -> Tensor:
        """(batch, longest) bool."""
        longest = max(self.lengths)
        place = torch.arange(longest)
        starts = [longest - length if self.before else 0 for length in self.lengths]
        spans = zip(starts, self.lengths, strict=True)
        return torch.stack([(place >= start) & (place < start + length) for start, length in spans])


def is_resolved(case: Drawn) -> bool:
    """Whether every query's mass at power 2 can be told from rounding: else the op says what it takes it for.

    That is 2^-12 of what the squares of the features alone hold.
    """
    feature_map = getattr(case.module, "feature_map", None) if hasattr(case.module, "operands") else None
    power = case.options.get("power") if case.name == OP else getattr(feature_map, "power", None)
    if power != 2 or case.dtype == torch.float64:
        return True
    for row, length in enumerate(case.lengths):
        query, key, _, hidden = (x[row : row + 1].narrow(-2, 0, length) for x in case.inputs)
        if case.name != OP:
            (query, key), _ = case.module.operands(query, key, torch.float64, hidden)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        masses = (query @ key.mT).square(), query.square().sum(-1)[..., None] * key.square().sum(-1)[..., None, :]
        weights, squares = (x.tril() if case.causal else x for x in masses)
        if bool((weights.sum(-1) < _RESOLUTION * squares.sum(-1)).any()):
            return False
    return True


class LinearAttention(nn.Module):
    """The op with the call of a mechanism; log decay comes in the place of hidden."""

    is_bidirectional, is_causal, reads_hidden = True, True, True

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options, self.backend = options, "reference"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """(batch, heads, length, r) features and so on; a log decay is (batch, length, key_heads)."""
        decay = hidden.mT if hidden is not None and causal else None
        backend = self.backend if ops.linear_attention_backend(query, key, value) == "native" else "chunked"
        backend = "reference" if self.backend == "reference" else backend
        options = {**self.options, "log_decay": decay, "key_mask": key_mask, "backend": backend}
        return ops.linear_attention(query, key, value, causal=causal, **options).output


def draw(seed: int) -> Drawn:
    """The case of a seed."""
    chosen = random.Random(seed)
    name = chosen.choice(NAMES)
    kv_heads = chosen.choice((1, 1, 2))
    heads, head_dim = kv_heads * chosen.choice((1, 1, 2, 3)), chosen.choice((3, 4, 8, 12))
    value_dim = chosen.choice((head_dim, 1, 5, 16))
    options, module = _module(chosen, name, seed, (heads, kv_heads, head_dim))
    directions = [True] * module.is_causal + [False] * module.is_bidirectional
    dtype = torch.float64 if name in JUMPS else chosen.choice(DTYPES)
    rows, same = chosen.choice((1, 2, 3)), chosen.choice(_LENGTHS)
    lengths = [same] * rows if chosen.random() < 0.5 else [chosen.choice(_LENGTHS) for _ in range(rows)]
    scale, inputs = _inputs(chosen, seed, name, lengths, (heads, kv_heads, head_dim, value_dim), dtype, _kinds(module))
    cut = sorted(chosen.sample(range(1, max(lengths)), min(chosen.choice((0, 1, 2, 4)), max(lengths) - 1)))
    return Drawn(
        name=name,
        options=options,
        module=module.to(dtype).double(),
        causal=chosen.choice(directions),
        dtype=dtype,
        lengths=lengths,
        inputs=inputs,
        garbage=chosen.choice((0.0, 50.0, float("nan"), float("inf"))) if name != OP else chosen.choice((0.0, 50.0)),
        before=chosen.choice((True, False)),
        cuts=cut,
        layout=chosen.choice(tuple(LAYOUTS)),
        backend=chosen.choice(("chunked", "native")),
        scale=scale,
        heads=(heads, kv_heads, head_dim, value_dim),
    )


def _module(chosen: random.Random, name: str, seed: int, sizes: tuple[int, int, int]) -> tuple[dict[str, Any], Any]:
    """A mechanism of options that go together, with weights of the seed."""
    if name == OP:
        options = {
            "power": chosen.choice((1, 2)),
            "normalize": chosen.choice((True, True, False)),
            "offset": chosen.choice((0.0, 1.0)),
            "compute_chunk": chosen.choice((None, 16, 32)),
        }
        return options, LinearAttention(options)
    taken = [option for option in attention.option_names(name) if option in _VALUES]
    for _ in range(1000):
        options = {option: chosen.choice(_VALUES[option]) for option in taken if chosen.random() < 0.6}
        if "hidden_size" in attention.option_names(name):
            options["hidden_size"] = HIDDEN
        torch.manual_seed(seed)
        try:
            heads, kv_heads, head_dim = sizes
            module = attention.build(name, num_heads=heads, head_dim=head_dim, num_kv_heads=kv_heads, **options)
        except (ValueError, TypeError):
            continue
        if isinstance(getattr(module, "coefficients", None), nn.Parameter):
            # Those drawn reach from -50 to 50: sums of large numbers that cancel tell rounding alone.
            module.coefficients.data.abs_()
        return options, module
    raise AssertionError(f"no options of {name} go together")


def _inputs(
    chosen: random.Random,
    seed: int,
    name: str,
    lengths: list[int],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    kinds: tuple[str, ...],
) -> tuple[str, list[Tensor]]:
    """Tensors of the longest row, of one of several kinds, rounded to the dtype."""
    heads, kv_heads, head_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    lead, longest = len(lengths), max(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = normal(lead, heads, longest, head_dim), normal(lead, kv_heads, longest, head_dim)
    value, hidden = normal(lead, kv_heads, longest, value_dim), normal(lead, longest, HIDDEN)
    scale = chosen.choice(kinds)
    query, key = _SCALES[scale](query, key)
    if name == OP:
        strength = chosen.choice((0.0, 0.01, 1.0, 100.0))
        query, key = query.abs(), key.abs()
        hidden = -strength * normal(lead, longest, kv_heads).abs() * (normal(lead, longest, kv_heads) > 0)
        scale = f"{scale}, decay of {strength}"
    else:
        hidden = chosen.choice((0.0, 1.0, 20.0)) * hidden
    return scale, [x.to(dtype).double() for x in (query, key, value, hidden)]


def _kinds(module: Any) -> tuple[str, ...]:
    """Of inputs. Sums of squares cannot tell the mass of a query orthogonal to all keys from rounding, as the op says.

    Many keys are seldom all orthogonal to a query; equal ones are.
    """
    power = getattr(getattr(module, "feature_map", None), "power", None) or getattr(module, "options", {}).get("power")
    return tuple(kind for kind in _SCALES if kind != "equal keys" or power != 2)


_SCALES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "normal": lambda query, key: (query, key),
    "small": lambda query, key: (0.1 * query, 0.1 * key),
    "large": lambda query, key: (4 * query, 4 * key),
    "zeros": lambda query, key: (0 * query, 0 * key),
    "zero keys": lambda query, key: (query, 0 * key),
    "equal keys": lambda query, key: (query, key[:, :, :1].expand_as(key).contiguous()),
    "leaning": lambda query, key: (query + 1, key + 1),
}


def _by_tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _part_of_wider(x: Tensor) -> Tensor:
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def _every_other(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], x.shape[1], 2 * x.shape[2], *x.shape[3:]), float("nan"))
    wide[:, :, ::2] = x
    return wide[:, :, ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads beside widths": _by_tokens,
    "columns of a wider tensor": _part_of_wider,
    "every other token": _every_other,
    "widths before tokens": lambda x: x.mT.contiguous().mT,
}
