"""The triton backend: the chunked algorithm as programs for CUDA devices (`ops/triton/programs/linear_*.py`).

Forward, two passes: the sums before every chunk, kept in memory in the dtype of the products; then every block of
queries on its own reads them and adds what its chunk holds. Backward: the sums again, and in reverse their gradients;
then queries, keys and what is inside the chunks, each block on its own. Nothing is kept between the two but the output
and a denominator for each row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.tiles import TILE, expanded_size, on_diagonal, symmetrize
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan
from polysketch.ops.triton import availability, configuration, launch, precision

WIDEST_VALUE = 128
"""Gradients are made of whole rows of values, in registers."""

ROWS_OF_A_PROGRAM = 128
"""About so many rows of the sums are one program."""

SCRATCH_BYTES = 2**30
"""Of the sums before every chunk, kept at once; more heads than fit take turns."""


def why_not(query: Tensor, value: Tensor | None = None) -> str | None:
    """Why the programs cannot take a call with tensors like these; None where they can."""
    if value is not None and value.shape[-1] > WIDEST_VALUE:
        return f"the triton backend takes values up to {WIDEST_VALUE} wide, got {value.shape[-1]}"
    return availability.why_not(query)


def pieces(feature_dim: int, power: int) -> int:
    """Into how many programs the sums of one head are cut."""
    return _blocks(expanded_size(feature_dim, power), ROWS_OF_A_PROGRAM)


def forward(inputs: Inputs, plan: Plan) -> Outputs:
    """The op on aligned inputs; see `polysketch.ops.linear_attention` for the formula."""
    outputs = Outputs.empty(inputs, plan)
    for part in _parts(inputs, plan):
        _forward(_Call(part.inputs(inputs), plan), Outputs(*(part.of(tensor) for tensor in outputs)))
    return outputs


def backward(inputs: Inputs, plan: Plan, outputs: Outputs, upstream: Outputs) -> dict[str, Tensor]:
    """Gradients by the names of `Inputs`; see `Backend`.

    Args:
        inputs, plan: of the forward call.
        outputs: what it gave.
        upstream: the gradients of its outputs, contiguous.
    """
    given = inputs._replace(log_decay=None).differentiable()
    # The gradient of the decay adds up products with these over the whole sequence: no rounding before.
    exact = ("query", "key") if inputs.log_decay is not None else ()
    gradients = {
        name: tensor.new_empty(tensor.shape, dtype=torch.float32 if name in exact else tensor.dtype)
        for name, tensor in given.items()
    }
    for part in _parts(inputs, plan):
        _backward(
            _Call(part.inputs(inputs), plan),
            Outputs(*(part.of(tensor) for tensor in outputs)),
            Outputs(*(part.of(tensor) for tensor in upstream)),
            {name: part.of(tensor) for name, tensor in gradients.items()},
        )
    return gradients


_Pair = tuple[Tensor | None, Tensor | None]  # sums and normalizer, where there are any


class _Part(NamedTuple):
    """Rows of the batch, and of their key heads, that are worked on together; one of the two is everything."""

    rows: slice
    first: int
    last: int
    key_heads: int

    def of(self, tensor: Tensor) -> Tensor:
        """This part of (batch, heads, ...), a contiguous one of a contiguous tensor."""
        shared = tensor.shape[1] // self.key_heads
        return tensor[self.rows, self.first * shared : self.last * shared]

    def inputs(self, inputs: Inputs) -> Inputs:
        """This part of every input."""
        length = None if inputs.length is None else inputs.length[self.rows]
        return inputs._replace(
            **{name: self.of(tensor) for name, tensor in inputs.differentiable().items()}, length=length
        )


def _parts(inputs: Inputs, plan: Plan) -> Iterator[_Part]:
    """As few parts as keep the scratch memory within its limit, at least a key head each."""
    batch, heads, length = inputs.key.shape[:3]
    chunks = -(-length // plan.chunk) if plan.causal else 1
    # Sums in the dtype of the products, normalizers in float32.
    row = inputs.value.shape[3] * (2 if inputs.value.dtype == torch.bfloat16 else 4) + 4
    of_head = chunks * expanded_size(inputs.key.shape[3], plan.power) * row
    fitting = max(1, SCRATCH_BYTES // of_head)
    if fitting >= heads:
        rows = fitting // heads
        yield from (_Part(slice(row, min(row + rows, batch)), 0, heads, heads) for row in range(0, batch, rows))
        return
    for row in range(batch):
        for head in range(0, heads, fitting):
            yield _Part(slice(row, row + 1), head, min(head + fitting, heads), heads)


class _Sums(NamedTuple):
    """What `linear_fold` gives: weighted sums before every chunk, and sums after the last, in the public layout."""

    states: Tensor | None
    state_normalizers: Tensor | None
    final: Tensor | None
    final_normalizer: Tensor | None

    def copy_final_to(self, sums: Tensor, normalizer: Tensor) -> None:
        """Hand over the sums after the last chunk."""
        assert self.final is not None
        assert self.final_normalizer is not None
        sums.copy_(self.final)
        normalizer.copy_(self.final_normalizer)


@dataclass
class _Call:
    """One call: its sizes, its factors of decay, and the launches that forward and backward are made of."""

    inputs: Inputs
    plan: Plan

    def __post_init__(self) -> None:
        query, key, value = self.inputs.query, self.inputs.key, self.inputs.value
        self.batch, self.key_heads, self.length, self.features = key.shape
        self.heads, self.queries, self.width = query.shape[1], query.shape[2], value.shape[3]
        self.shared = self.heads // self.key_heads
        # What is not causal reads the sums of everything: one chunk of all keys.
        self.chunk = self.plan.chunk if self.plan.causal else self.length
        self.chunks = _blocks(self.length, self.chunk)
        self.local = self.inputs.local_query is not None
        self.expanded = expanded_size(self.features, self.plan.power)
        self.dot = torch.bfloat16 if value.dtype == torch.bfloat16 else torch.float32
        self.like = value
        inner = (self.inputs.local_query, self.inputs.local_key) if self.local else (query, key)
        self.inner_query, self.inner_key = (_unit_stride(tensor) for tensor in inner if tensor is not None)
        self.query, self.key, self.value = _unit_stride(query), _unit_stride(key), _unit_stride(value)
        self.exponent = self.plan.degree if self.local else self.plan.power

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.like.new_empty(shape, dtype=dtype)

    def launch(self, kernel, programs: int, *arguments, use: dict[str, int], **constants: int) -> None:
        """Launch with the constants that every program here has."""
        import triton.language as tl  # absolute: Triton, not this module

        dot = tl.bfloat16 if self.dot == torch.bfloat16 else tl.float32
        launch(
            kernel,
            programs,
            *arguments,
            configuration=use,
            WIDTH=self.width,
            PRECISION=precision(self.like.dtype),
            DOT=dot,
            **constants,
        )

    def use(self, program: str, **at_most: int) -> dict[str, int]:
        """The tuned constants, none of the named ones larger than what there is to cover."""
        found = configuration(
            program,
            self.like.device,
            power=self.plan.power,
            features=self.features,
            width=self.width,
            inner=self.inner_key.shape[3],
            products=_products(self.like.dtype),
        )
        for name, size in at_most.items():
            found[name] = min(found[name], _block(size))
        return found

    # Decay and folding.

    @cached_property
    def since(self) -> Tensor | None:
        """(batch, key_heads, length): log decay since the chunk began, the token's own included."""
        if self.inputs.log_decay is None:
            return None
        return self._in_chunks(self.inputs.log_decay.float()).cumsum(-1).flatten(2)[..., : self.length].contiguous()

    @cached_property
    def read_factor(self) -> Tensor | None:
        """(batch, key_heads, length): what a query multiplies the sums before its chunk by."""
        return None if self.since is None else self.since.exp()

    @cached_property
    def folded(self) -> Tensor | None:
        """(batch, 1, length) of ones and zeros: whether a token is folded into the sums; None where all are.

        Where nothing reads the last sums, the open chunk may be folded into them as well.
        """
        chunk = self.chunk if self.local else 1
        if self.inputs.length is None and (self.length % chunk == 0 or not self.plan.return_sums):
            return None
        steps = torch.arange(self.length, device=self.like.device)
        if self.inputs.length is None:
            return (steps < self.length - self.length % chunk).float().expand(self.batch, 1, -1)
        length = self.inputs.length.to(self.like.device)[:, None]
        return (steps < length - length % chunk).float()[:, None]

    @cached_property
    def folding(self) -> tuple[Tensor | None, Tensor | None]:
        """What a token is folded with (batch, key_heads, length), and the sums before its chunk (..., chunks)."""
        if self.inputs.log_decay is None:
            if self.folded is None:
                return None, None
            return self.folded.expand(-1, self.key_heads, -1).contiguous(), None
        decay = self.inputs.log_decay.float()
        since = self._in_chunks(decay if self.folded is None else decay * self.folded).cumsum(-1)
        total = since[..., -1:]
        # Differences, never ratios of exponentials: at most zero, so nothing overflows.
        factor = (total - since).clamp(max=0).exp().flatten(2)[..., : self.length]
        return (factor if self.folded is None else factor * self.folded).contiguous(), total[..., 0].exp().contiguous()

    def _in_chunks(self, tokens: Tensor) -> Tensor:
        """(batch, key_heads, length) -> (batch, key_heads, chunks, chunk), filled up with zeros."""
        missing = self.chunks * self.chunk - self.length
        return torch.nn.functional.pad(tokens, (0, missing)).unflatten(2, (self.chunks, self.chunk))

    # Launches.

    def fold_keys(self, *, states: bool, final: bool) -> _Sums:
        """The sums of a sequence."""
        initial = (self.inputs.sums, self.inputs.normalizer)
        return self._fold(self.key, self.value, None, *self.folding, initial, 1, False, states, final)

    def fold_queries(
        self,
        numerator: Tensor,
        mass: Tensor,
        initial: _Pair,
        *,
        states: bool,
        final: bool,
    ) -> _Sums:
        """The gradient of the sums, from the end of the sequence to its beginning."""
        carry, factor = (self.folding[1], self.read_factor) if self.plan.causal else (None, None)
        return self._fold(self.query, numerator, mass, factor, carry, initial, self.shared, True, states, final)

    def _fold(
        self,
        x: Tensor,
        y: Tensor,
        u: Tensor | None,
        factor: Tensor | None,
        carry: Tensor | None,
        initial: _Pair,
        shared: int,
        reverse: bool,
        states: bool,
        final: bool,
    ) -> _Sums:
        from polysketch.ops.triton.programs.linear_fold import linear_fold

        length = x.shape[2]
        chunk, chunks = self._chunks_of(length)
        lead = (self.batch, self.key_heads)
        found = _Sums(
            self.new(*lead, chunks, self.expanded, self.width, dtype=self.dot) if states else None,
            self.new(*lead, chunks, self.expanded) if states else None,
            self.new(*lead, self.expanded, self.width) if final else None,
            self.new(*lead, self.expanded) if final else None,
        )
        use = self.use("linear_fold", COLUMNS=self.width, ROWS=self._most_rows())
        first_sums, first_normalizer = (None if each is None else each.float().contiguous() for each in initial)
        self.launch(
            linear_fold,
            self.batch * self.key_heads * _blocks(self.expanded, use["ROWS"]) * _blocks(self.width, use["COLUMNS"]),
            *(x, y, u, factor, carry, first_sums, first_normalizer, *found),
            *(*x.stride()[:3], *y.stride()[:3], length, chunk, chunks),
            use=use,
            KEY_HEADS=self.key_heads,
            SHARED=shared,
            FEATURES=self.features,
            POWER=self.plan.power,
            REVERSE=reverse,
            GRADIENT=reverse,
            WRITE_STATES=states,
            WRITE_FINAL=final,
        )
        return found

    def outputs(self, sums: _Sums, outputs: Outputs) -> None:
        """What every query reads."""
        from polysketch.ops.triton.programs.linear_outputs import linear_outputs

        inner = self.inner_key.shape[3]
        chunk, chunks = self._chunks_of(self.queries)
        use = self.use("linear_outputs", COLUMNS=self.width, DEPTH=inner, ROWS=self._most_rows())
        blocks = _blocks(chunk, use["QUERIES"]) * _blocks(self.width, use["COLUMNS"])
        self.launch(
            linear_outputs,
            self.batch * self.heads * chunks * blocks,
            *(self.query, self.value, self.inner_query, self.inner_key),
            *(self.read_factor if self.plan.causal else None, None if self.local else self.since),
            *(sums.states, sums.state_normalizers, outputs.output, outputs.denominator),
            *(*self.query.stride()[:3], *self.value.stride()[:3]),
            *(*self.inner_query.stride()[:3], *self.inner_key.stride()[:3]),
            *(self.plan.offset, self.queries, chunk, chunks),
            use=use,
            HEADS=self.heads,
            SHARED=self.shared,
            FEATURES=self.features,
            INNER=inner,
            POWER=self.plan.power,
            EXPONENT=self.exponent,
            DIAGONAL=int(self.plan.diagonal) if self.plan.causal else 0,
            NORMALIZE=self.plan.normalize,
            SKIP_FIRST=self.plan.causal and self.inputs.sums is None,
        )

    def upstream(self, outputs: Outputs, upstream: Outputs) -> tuple[Tensor, Tensor]:
        """Gradients of the numerators, in the dtype of the products, and of the denominators."""
        from polysketch.ops.triton.programs.linear_sums_gradient import linear_upstream

        numerator = self.new(*outputs.output.shape, dtype=self.dot)
        mass = self.new(*outputs.denominator.shape)
        rows = mass.numel()
        use = self.use("linear_upstream")
        launch(
            linear_upstream,
            _blocks(rows, use["TOKENS"]),
            *(outputs.output, upstream.output, outputs.denominator, upstream.denominator, numerator, mass, rows),
            configuration=use,
            WIDTH=self.width,
            NORMALIZE=self.plan.normalize,
            COLUMNS=_block(self.width),
        )
        return numerator, mass

    def query_gradient(self, sums: _Sums, numerator: Tensor, mass: Tensor, gradient: Tensor) -> None:
        """What the queries get through the sums that they have read."""
        factor = self.read_factor if self.plan.causal else None
        self._sums_gradient(self.query, numerator, mass, factor, sums, gradient, None, self.heads, self.shared)

    def key_gradient(self, sums: _Sums, gradient: Tensor, value_gradient: Tensor) -> None:
        """What keys and values get through the sums that they were folded into."""
        factor = self.folding[0]
        self._sums_gradient(self.key, self.value, None, factor, sums, gradient, value_gradient, self.key_heads, 1)

    def _sums_gradient(
        self,
        x: Tensor,
        upstream: Tensor,
        mass: Tensor | None,
        factor: Tensor | None,
        sums: _Sums,
        gradient: Tensor,
        read: Tensor | None,
        heads: int,
        shared: int,
    ) -> None:
        from polysketch.ops.triton.programs.linear_sums_gradient import linear_sums_gradient

        chunk, chunks = self._chunks_of(x.shape[2])
        use = self.use("linear_sums_gradient", ROWS=self._most_rows())
        self.launch(
            linear_sums_gradient,
            self.batch * heads * chunks * _blocks(chunk, use["TOKENS"]),
            *(x, upstream, mass, factor, sums.states, sums.state_normalizers, gradient, read),
            *(*x.stride()[:3], *upstream.stride()[:3], x.shape[2], chunk, chunks),
            use=use,
            HEADS=heads,
            SHARED=shared,
            FEATURES=self.features,
            POWER=self.plan.power,
            COLUMNS=_block(self.width),
        )

    def inner_gradients(self, numerator: Tensor, mass: Tensor, gradients: dict[str, Tensor]) -> None:
        """What passes through the weights inside chunks; the values', and sketched ones, are added to what is there."""
        from polysketch.ops.triton.programs.linear_inner_gradient import (
            linear_inner_key_gradient,
            linear_inner_query_gradient,
        )

        of_query, of_key = ("local_query", "local_key") if self.local else ("query", "key")
        inner = self.inner_key.shape[3]
        shared = (*(self.value, self.inner_query, self.inner_key, None if self.local else self.since, numerator, mass),)
        sizes = (
            *(*self.value.stride()[:3], *self.inner_query.stride()[:3], *self.inner_key.stride()[:3]),
            *(self.length, self.chunk, self.chunks),
        )
        constants = {
            "HEADS": self.heads,
            "SHARED": self.shared,
            "INNER": inner,
            "EXPONENT": self.exponent,
            "DIAGONAL": int(self.plan.diagonal),
            "ADD": not self.local,
            "COLUMNS": _block(self.width),
        }
        use = self.use("linear_inner_query_gradient", DEPTH=inner)
        blocks = self.chunks * _blocks(self.chunk, use["QUERIES"]) * _blocks(inner, use["DEPTH"])
        self.launch(
            linear_inner_query_gradient,
            self.batch * self.heads * blocks,
            *(*shared, gradients[of_query], *sizes),
            use=use,
            **constants,
        )
        use = self.use("linear_inner_key_gradient", DEPTH=inner)
        blocks = self.chunks * _blocks(self.chunk, use["KEYS"]) * _blocks(inner, use["DEPTH"])
        self.launch(
            linear_inner_key_gradient,
            self.batch * self.key_heads * blocks,
            *(*shared, gradients[of_key], gradients["value"], *sizes),
            use=use,
            **constants,
        )

    def _chunks_of(self, length: int) -> tuple[int, int]:
        """Tokens of a chunk and how many chunks: one of everything where nothing is causal."""
        chunk = self.chunk if self.plan.causal else length
        return max(1, chunk), _blocks(length, max(1, chunk))

    def _most_rows(self) -> int:
        return 256 if self.plan.power == 2 else self.features


def _forward(call: _Call, outputs: Outputs) -> None:
    plan = call.plan
    sums = call.fold_keys(states=plan.causal, final=plan.return_sums or not plan.causal)
    if call.queries:
        call.outputs(sums if plan.causal else _as_state(call, sums, weighted=False), outputs)
    if plan.return_sums:
        sums.copy_final_to(outputs.sums, outputs.normalizer)


def _backward(call: _Call, outputs: Outputs, upstream: Outputs, gradients: dict[str, Tensor]) -> None:
    plan = call.plan
    numerator, mass = call.upstream(outputs, upstream)
    if call.queries:
        _query_gradients(call, numerator, mass, gradients)
    wanted = call.inputs.sums is not None
    last = _upstream_sums(call, upstream)
    found = call.fold_queries(numerator, mass, last, states=plan.causal, final=wanted or not plan.causal)
    states = found if plan.causal else _as_state(call, found, weighted=True)
    call.key_gradient(states, gradients["key"], gradients["value"])
    if plan.causal and plan.diagonal != Diagonal.NONE:
        call.inner_gradients(numerator, mass, gradients)
    if wanted:
        found.copy_final_to(gradients["sums"], gradients["normalizer"])
        if not plan.causal and call.folding[1] is not None:
            gradients["sums"].mul_(call.folding[1][..., None])
            gradients["normalizer"].mul_(call.folding[1])


def _query_gradients(call: _Call, numerator: Tensor, mass: Tensor, gradients: dict[str, Tensor]) -> None:
    """In a function of its own, so that the sums before every chunk are gone before their gradients come."""
    causal = call.plan.causal
    sums = call.fold_keys(states=causal, final=not causal)
    states = sums if causal else _as_state(call, sums, weighted=False)
    call.query_gradient(states, numerator, mass, gradients["query"])


def _upstream_sums(call: _Call, upstream: Outputs) -> _Pair:
    """The gradient of the final sums, symmetric like every state."""
    if not call.plan.return_sums:
        return None, None
    if call.plan.power == 1:
        return upstream.sums, upstream.normalizer
    normalizer = symmetrize(upstream.normalizer[..., None], call.features)[..., 0]
    return symmetrize(upstream.sums, call.features), normalizer


def _as_state(call: _Call, sums: _Sums, *, weighted: bool) -> _Sums:
    """Sums after the last chunk as those that all tokens read: one chunk for them all, weighted as they are read."""
    assert sums.final is not None
    assert sums.final_normalizer is not None
    final, normalizer = sums.final, sums.final_normalizer
    if call.plan.power == 2 and not weighted:
        weights = 2.0 - on_diagonal(call.features, final.device).float().repeat_interleave(TILE * TILE)
        final, normalizer = final * weights[:, None], normalizer * weights
    return sums._replace(states=final.to(call.dot)[:, :, None], state_normalizers=normalizer[:, :, None])


def _products(dtype: torch.dtype) -> str:
    """What products are made of: bfloat16, tf32, or float32 as it is, "ieee"."""
    return "bfloat16" if dtype == torch.bfloat16 else precision(dtype)


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor with neighbouring columns side by side."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _block(size: int) -> int:
    """The smallest block that covers `size`: a power of two, at least 16, which products need."""
    return max(16, 1 << (size - 1).bit_length())


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
