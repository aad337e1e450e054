"""The native backend: the chunked algorithm as a program in C++ (`ops/native/source`), on a CPU.

It computes in float32, of half precision too; tensors in bfloat16 are multiplied so where that is faster
(`ops/native/bfloat16.py`). Every thread works through key heads of its own, one chunk after another,
in memory that stays in cache: 32 queries at a time, features expanded in strips, sums of products kept in registers.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.linear.packing_rows import Rows, num_pairs, pair_rows
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.types import Inputs, Outputs, Plan
from polysketch.ops.native import TensorPointer, expect_writes, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program
from polysketch.ops.native.bfloat16 import precision

_SIZES = ("heads", "key_heads", "queries", "keys", "features", "value_width", "local_width")
_OPTIONS = ("power", "factors", "causal", "normalize", "degree", "chunk", "diagonal", "return_sums")
_INPUTS = ("query", "key", "value", "local_query", "local_key", "log_decay")
_GRADIENTS = tuple(f"{name}_gradient" for name in ("query", "key", "value", "local_query", "local_key"))

# One token against a state has a program of its own, which updates the state where it lies.
_STEP_SIZES = ("heads", "key_heads", "features", "value_width", "local_width")
_STEP_OPTIONS = ("power", "factors", "normalize", "degree", "chunk", "expanded", "kind")
_STATE = ("sums", "normalizer", "log_decay", "open_features", "open_value", "open_key", "open_log_decay")
SUM_KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""What the sums of a step may be kept in, by the number that the program has for it."""
# Fewer sums than this are read by one thread: waking another costs more.
SUMS_WORTH_A_THREAD = 2**20


class _AttentionCall(ctypes.Structure):
    """`LinearAttentionCall` of linear_attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_SIZES, *_OPTIONS, "precision")),
        ("offset", ctypes.c_float),
        *((name, TensorPointer) for name in _INPUTS),
        *((name, TensorPointer) for name in ("output", "denominator")),
        *((name, ctypes.c_void_p) for name in ("length", "sums_in", "normalizer_in", "sums_out", "normalizer_out")),
        *((name, TensorPointer) for name in ("output_gradient", "denominator_gradient")),
        *((name, ctypes.c_void_p) for name in ("sums_out_gradient", "normalizer_out_gradient")),
        *((name, TensorPointer) for name in _GRADIENTS),
        *((name, ctypes.c_void_p) for name in ("sums_in_gradient", "normalizer_in_gradient")),
    )


class _ExtendCall(ctypes.Structure):
    """`ExtendCall` of linear_attention_extend.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _STEP_SIZES + _STEP_OPTIONS),
        ("offset", ctypes.c_float),
        *((name, TensorPointer) for name in (*_INPUTS, "output", "denominator", "strength")),
        *((f"state_{name}", TensorPointer) for name in _STATE),
        *((name, ctypes.c_void_p) for name in ("position", "rows")),
    )


def why_not(query: Tensor, value: Tensor | None = None) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    return why_no_program(query)


def forward(inputs: Inputs, plan: Plan) -> Outputs:
    """The op on aligned inputs; see `polysketch.ops.linear_attention` for the formula."""
    (batch, heads, length, _), value = inputs.query.shape, inputs.value
    layout = _Layout(inputs.key.shape[3], plan.power, plan.factors)
    expanded = layout.size if plan.return_sums else 0
    sizes = ((heads, length, value.shape[3]), (heads, length), (inputs.key.shape[1], expanded, value.shape[3]))
    found = Outputs(
        *(
            expect_writes(value.new_empty((batch, *size), dtype=torch.float32))
            for size in (*sizes, (inputs.key.shape[1], expanded))
        )
    )
    call = _Arguments(inputs, plan, layout)
    call.rows(output=found.output, denominator=found.denominator)
    if plan.return_sums:
        call.flat(sums_out=found.sums, normalizer_out=found.normalizer)
    call.run(library().linear_attention_forward)
    found = found._replace(output=found.output.to(value.dtype))
    if not plan.return_sums:
        return found
    return found._replace(sums=layout.to_public(found.sums), normalizer=layout.to_public(found.normalizer))


def backward(inputs: Inputs, plan: Plan, outputs: Outputs, upstream: Outputs) -> dict[str, Tensor]:
    """Gradients by the names of `Inputs`, in float32; see `Backend`.

    Args:
        inputs, plan: of the forward call.
        outputs: what it gave.
        upstream: the gradients of its outputs.
    """
    layout = _Layout(inputs.key.shape[3], plan.power, plan.factors)
    given = inputs._replace(log_decay=None).differentiable()
    gradients = {
        name: expect_writes(tensor.new_empty(tensor.shape, dtype=torch.float32)) for name, tensor in given.items()
    }
    call = _Arguments(inputs, plan, layout)
    call.rows(output=outputs.output, denominator=outputs.denominator)
    call.rows(output_gradient=upstream.output, denominator_gradient=upstream.denominator)
    call.rows(**{f"{name}_gradient": gradients[name] for name in given if f"{name}_gradient" in _GRADIENTS})
    if plan.return_sums:
        of_sums, of_normalizer = layout.to_public_backward(upstream.sums, upstream.normalizer)
        call.flat(sums_out_gradient=of_sums, normalizer_out_gradient=of_normalizer)
    if inputs.sums is not None:
        shape = (*inputs.key.shape[:2], layout.size, inputs.value.shape[3])
        sums = inputs.value.new_empty(shape, dtype=torch.float32)
        normalizer = sums.new_empty(sums.shape[:3])
        call.flat(sums_in_gradient=sums, normalizer_in_gradient=normalizer)
    call.run(library().linear_attention_backward)
    if inputs.sums is not None:
        gradients["sums"], gradients["normalizer"] = layout.from_public_backward(sums, normalizer)
    return gradients


def can_extend(query: Tensor, state: LinearAttentionState | StateRows) -> bool:
    """Whether the program can take this call: on a CPU, not float64, each head of a state in one piece, a compiler."""
    if why_no_program(query) is not None or state.pool.sums.dtype not in SUM_KINDS:
        return False
    return all(tensor[0, 0].is_contiguous() for tensor in _kept(state) if 0 not in tensor.shape)


def _kept(state: LinearAttentionState | StateRows) -> list[Tensor]:
    """The tensors of a state that the program reads and writes, in the order of `_STATE`."""
    return [getattr(state.pool, name) for name in _STATE]


def extend_one_(
    inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows, strength: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and denominator of one token, already checked; the state moves on.

    Args:
        inputs, plan, state: of the call.
        strength: (batch, key_heads, 1), by which the delta rule writes the value; None to add the value as it is. At
            power 1, without a local part and without decay.
    """
    query, key, value, local_query, local_key, log_decay, *_ = inputs
    (batch, heads, _, features), key_heads, width = query.shape, key.shape[1], value.shape[3]
    output = value.new_empty((batch, heads, 1, width), dtype=torch.float32)
    denominator = output.new_empty(batch, heads, 1)
    chunk, local_width = (0, 0) if local_key is None else (plan.chunk, local_key.shape[3])
    rows = [query, key, value, local_query, local_key, log_decay, output, denominator, strength]
    kept = [None if tensor is None else _innermost_contiguous(tensor.float()) for tensor in rows]
    own = _kept(state)
    expanded = own[0].shape[2]
    call = _ExtendCall(
        *(heads, key_heads, features, width, local_width),
        *(state.power, state.factors, plan.normalize, plan.degree, chunk, expanded, SUM_KINDS.index(own[0].dtype)),
        plan.offset,
        *(TensorPointer() if tensor is None else TensorPointer.of(tensor) for tensor in kept),
        *(TensorPointer.of_heads(tensor) for tensor in own),
        state.position.data_ptr(),
        None if state.rows is None else state.rows.data_ptr(),
    )
    program, units = library().linear_attention_extend, batch * key_heads
    if units * expanded * width < SUMS_WORTH_A_THREAD:
        run_program(program, call, range(units))
    else:
        run_in_threads(program, call, units, [*kept, *own, state.position, state.rows])
    state.advance_()
    return output.to(value.dtype), denominator


class _Layout:
    """Sums between the public layout and the program's; normalizers are sums of width 1.

    Args:
        feature_dim: r.
        power, factors: as in `linear_attention`; at power 1 the two layouts are one.
    """

    def __init__(self, feature_dim: int, power: int, factors: int) -> None:
        self.feature_dim, self.power = feature_dim, power
        self.size = num_pairs(feature_dim) if power == 2 else expanded_size(feature_dim, power, factors)

    def from_public(self, tensor: Tensor) -> Tensor:
        return self._apply(Rows.from_tiles, tensor)

    def to_public(self, tensor: Tensor) -> Tensor:
        return self._apply(Rows.to_tiles, tensor)

    def to_public_backward(self, *gradients: Tensor) -> list[Tensor]:
        return [self._apply(Rows.to_tiles_backward, gradient) for gradient in gradients]

    def from_public_backward(self, *gradients: Tensor) -> list[Tensor]:
        return [self._apply(Rows.from_tiles_backward, gradient) for gradient in gradients]

    def _apply(self, move: Callable[[Rows, Tensor], Tensor], tensor: Tensor) -> Tensor:
        if self.power == 1:
            return tensor.contiguous()
        rows = pair_rows(self.feature_dim, tensor.device)
        if tensor.dim() == 3:
            return move(rows, tensor[..., None])[..., 0].contiguous()
        return move(rows, tensor).contiguous()


class _Arguments:
    """A `_AttentionCall` and the tensors that its pointers look into."""

    def __init__(self, inputs: Inputs, plan: Plan, layout: _Layout) -> None:
        self._kept: list[Tensor] = []
        query, key, value = inputs.query, inputs.key, inputs.value
        local_width = 0 if inputs.local_query is None else inputs.local_query.shape[3]
        sizes = (query.shape[1], key.shape[1], query.shape[2], key.shape[2], key.shape[3], value.shape[3], local_width)
        options = (int(getattr(plan, name)) for name in _OPTIONS)
        # Products of two factors are made by the number and rounded one by one, which takes what the products gain.
        by = precision(query, key, value, gains=plan.factors == 1)
        self._units = key.shape[0] * key.shape[1]
        self._call = _AttentionCall(*sizes, *options, by, plan.offset)
        self.rows(**{name: tensor for name in _INPUTS if (tensor := getattr(inputs, name)) is not None})
        if inputs.length is not None:
            self._point("length", inputs.length.to(torch.int64))
        if inputs.sums is not None and inputs.normalizer is not None:
            self.flat(
                sums_in=layout.from_public(inputs.sums.float()),
                normalizer_in=layout.from_public(inputs.normalizer.float()),
            )

    def rows(self, **tensors: Tensor) -> None:
        """Tensors (batch, heads, tokens) or (batch, heads, tokens, width), of any strides."""
        for name, tensor in tensors.items():
            rows = tensor[..., None] if tensor.dim() == 3 else tensor
            # Only the inputs may need a copy: those that are written are contiguous, of the right dtype.
            rows = rows.float() if rows.shape[3] == 1 or rows.stride(3) == 1 else rows.float().contiguous()
            self._kept.append(rows)
            setattr(self._call, name, TensorPointer.of(rows))

    def flat(self, **tensors: Tensor) -> None:
        """Contiguous tensors."""
        for name, tensor in tensors.items():
            self._point(name, tensor)

    def run(self, program: Callable[..., int]) -> None:
        """Run the program on all key heads, dealt out to the threads."""
        run_in_threads(program, self._call, self._units, self._kept)

    def _point(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        setattr(self._call, name, tensor.data_ptr())


def _innermost_contiguous(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3 or tensor.shape[3] == 1 or tensor.stride(3) == 1:
        return tensor
    return tensor.contiguous()
