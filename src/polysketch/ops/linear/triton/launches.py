"""The launches that forward and backward of linear attention are made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from polysketch.ops.linear.triton.call import ProgramCall, covering_block, num_blocks
from polysketch.ops.linear.types import Outputs
from polysketch.ops.triton import launch

SumsPair = tuple[Tensor | None, Tensor | None]
"""Sums and normalizer, where there are any."""


class FoldedSums(NamedTuple):
    """What `linear_fold` gives: weighted sums before every chunk, and sums after the last, in the public layout."""

    states: Tensor | None
    state_normalizers: Tensor | None
    final: Tensor | None
    final_normalizer: Tensor | None

    def of_whole_sequence(self) -> "FoldedSums":
        """Those after the last span, as the sums of the sequence."""
        if self.final is None or self.final_normalizer is None:
            return self
        return self._replace(final=self.final[:, :, -1], final_normalizer=self.final_normalizer[:, :, -1])

    def copy_final_to(self, sums: Tensor, normalizer: Tensor) -> None:
        """Hand over the sums after the last chunk."""
        assert self.final is not None
        assert self.final_normalizer is not None
        sums.copy_(self.final)
        normalizer.copy_(self.final_normalizer)


_PROGRAMS = 512
"""So many keep a GPU busy, about four for each multiprocessor."""
_SHORTEST_SPAN = 1024
"""Tokens: what a span costs more, the sums before it, is little beside what it does."""
_FEW_CHUNKS = 64
"""More are not cut as `spans_of` says: another thread's long call would have a sum for each of its chunks."""
_required: list[int] = []


def in_spans(programs: int, chunk: int, chunks: int) -> tuple[int, int]:
    """How many spans a sequence is cut into where so many programs go through it side by side, and chunks of a span.

    More than one keep a device busy where heads are few. What is folded is folded twice then: about half as much work
    again for as many times more programs.
    """
    shortest = num_blocks(_SHORTEST_SPAN, max(1, chunk))
    spans = max(1, min(_PROGRAMS // max(1, programs), chunks // shortest))
    span = _required[-1] if _required and chunks <= _FEW_CHUNKS else max(1, num_blocks(chunks, spans))
    return max(1, num_blocks(chunks, span)), span


@contextmanager
def spans_of(chunks: int) -> Iterator[None]:
    """Within this block every sequence of few chunks is cut into spans of so many, however long they are."""
    _required.append(chunks)
    try:
        yield
    finally:
        _required.pop()


def _left_by_spans(carry: Tensor | None, spans: int, span: int, *, reverse: bool) -> Tensor | None:
    """(batch, key_heads, spans - 1): what each span but the last leaves of earlier sums, as spans are gone through.

    carry: (batch, key_heads, chunks), what each chunk leaves.
    """
    if carry is None:
        return None
    in_turn = carry.flip(2) if reverse else carry
    return in_turn[..., : (spans - 1) * span].unflatten(2, (spans - 1, span)).prod(3)


class Launches(ProgramCall):
    """A call, and what can be launched for it."""

    def fold_keys(self, *, states: bool, final: bool) -> FoldedSums:
        """The sums of a sequence."""
        initial = (self.inputs.sums, self.inputs.normalizer)
        return self._fold(self.key, self.value, None, *self.folding, initial, 1, False, states, final)

    def fold_queries(
        self,
        numerator: Tensor,
        mass: Tensor,
        initial: SumsPair,
        *,
        states: bool,
        final: bool,
    ) -> FoldedSums:
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
        initial: SumsPair,
        shared: int,
        reverse: bool,
        states: bool,
        final: bool,
    ) -> FoldedSums:
        chunk, chunks = self.chunks_of(x.shape[2])
        use = self.use("linear_fold", COLUMNS=self.width, ROWS=self.most_rows())
        of_head = self.sums_blocks(use["ROWS"]) * num_blocks(self.width, use["COLUMNS"])
        spans, span = in_spans(self.batch * self.key_heads * of_head, chunk, chunks)
        first_sums, first_normalizer = (None if each is None else each.float().contiguous() for each in initial)

        def run(sums: FoldedSums, spans: int, first: SumsPair, spans_before: tuple[Tensor | None, ...]) -> None:
            """Fold so many spans, the first from `first` on, each from the spans before it on if they are given."""
            self._launch_fold(
                self.batch * self.key_heads * spans * of_head,
                *(x, y, u, factor, carry, *first, *spans_before, *sums),
                *(*x.stride()[:3], *y.stride()[:3], x.shape[2], chunk, chunks, spans, span),
                use=use,
                SHARED=shared,
                REVERSE=reverse,
                GRADIENT=reverse,
                WRITE_STATES=sums.states is not None,
                WRITE_FINAL=sums.final is not None,
            )

        spans_before: tuple[Tensor | None, ...] = (None, None, None)
        if spans > 1:
            alone = self._new_sums(0, spans - 1)
            run(alone, spans - 1, (None, None), spans_before)
            spans_before = (alone.final, alone.final_normalizer, _left_by_spans(carry, spans, span, reverse=reverse))
        found = self._new_sums(chunks if states else 0, 1 if final else 0)
        run(found, spans, (first_sums, first_normalizer), spans_before)
        return found.of_whole_sequence()

    def _new_sums(self, chunks: int, spans: int) -> FoldedSums:
        """Memory for the sums before so many chunks, and after so many spans; None for those of none."""
        lead, rows = (self.batch, self.key_heads), self.expanded
        return FoldedSums(
            self.new(*lead, chunks, rows, self.width, dtype=self.dot) if chunks else None,
            self.new(*lead, chunks, rows) if chunks else None,
            self.new(*lead, spans, rows, self.width) if spans else None,
            self.new(*lead, spans, rows) if spans else None,
        )

    def _launch_fold(self, programs: int, *arguments: Any, use: dict[str, int], **constants: Any) -> None:
        from polysketch.ops.linear.triton.programs.fold import linear_fold

        self.launch(
            linear_fold,
            programs,
            *arguments,
            use=use,
            KEY_HEADS=self.key_heads,
            FEATURES=self.features,
            POWER=self.plan.power,
            FACTORS=self.plan.factors,
            **constants,
        )

    def outputs(self, sums: FoldedSums, outputs: Outputs) -> None:
        """What every query reads."""
        from polysketch.ops.linear.triton.programs.outputs import linear_outputs

        inner = self.inner_key.shape[3]
        chunk, chunks = self.chunks_of(self.queries)
        use = self.use("linear_outputs", COLUMNS=self.width, DEPTH=inner, ROWS=self.most_rows())
        blocks = num_blocks(chunk, use["QUERIES"]) * num_blocks(self.width, use["COLUMNS"])
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
            FACTORS=self.plan.factors,
            EXPONENT=self.exponent,
            INNER_FACTORS=self.inner_factors,
            DIAGONAL=int(self.plan.diagonal) if self.plan.causal else 0,
            NORMALIZE=self.plan.normalize,
            SKIP_FIRST=self.plan.causal and self.inputs.sums is None,
        )

    def upstream(self, outputs: Outputs, upstream: Outputs) -> tuple[Tensor, Tensor]:
        """Gradients of the numerators, in the dtype of the products, and of the denominators."""
        from polysketch.ops.linear.triton.programs.sums_gradient import linear_upstream

        numerator = self.new(*outputs.output.shape, dtype=self.dot)
        mass = self.new(*outputs.denominator.shape)
        rows = mass.numel()
        use = self.use("linear_upstream")
        launch(
            linear_upstream,
            num_blocks(rows, use["TOKENS"]),
            *(outputs.output, upstream.output, outputs.denominator, upstream.denominator, numerator, mass, rows),
            configuration=use,
            WIDTH=self.width,
            NORMALIZE=self.plan.normalize,
            COLUMNS=covering_block(self.width),
        )
        return numerator, mass

    def query_gradient(self, sums: FoldedSums, numerator: Tensor, mass: Tensor, gradient: Tensor) -> None:
        """What the queries get through the sums that they have read."""
        factor = self.read_factor if self.plan.causal else None
        self._sums_gradient(self.query, numerator, mass, factor, sums, gradient, None, self.heads, self.shared)

    def key_gradient(self, sums: FoldedSums, gradient: Tensor, value_gradient: Tensor) -> None:
        """What keys and values get through the sums that they were folded into."""
        factor = self.folding[0]
        self._sums_gradient(self.key, self.value, None, factor, sums, gradient, value_gradient, self.key_heads, 1)

    def _sums_gradient(
        self,
        x: Tensor,
        upstream: Tensor,
        mass: Tensor | None,
        factor: Tensor | None,
        sums: FoldedSums,
        gradient: Tensor,
        read: Tensor | None,
        heads: int,
        shared: int,
    ) -> None:
        from polysketch.ops.linear.triton.programs.sums_gradient import linear_sums_gradient

        chunk, chunks = self.chunks_of(x.shape[2])
        use = self.use("linear_sums_gradient", ROWS=self.most_rows())
        self.launch(
            linear_sums_gradient,
            self.batch * heads * chunks * num_blocks(chunk, use["TOKENS"]),
            *(x, upstream, mass, factor, sums.states, sums.state_normalizers, gradient, read),
            *(*x.stride()[:3], *upstream.stride()[:3], x.shape[2], chunk, chunks),
            use=use,
            HEADS=heads,
            SHARED=shared,
            FEATURES=self.features,
            POWER=self.plan.power,
            FACTORS=self.plan.factors,
            COLUMNS=covering_block(self.width),
        )

    def inner_gradients(self, numerator: Tensor, mass: Tensor, gradients: dict[str, Tensor]) -> None:
        """What passes through the weights inside chunks; the values', and sketched ones, are added to what is there."""
        from polysketch.ops.linear.triton.programs.inner_gradient import (
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
            "INNER_FACTORS": self.inner_factors,
            "DIAGONAL": int(self.plan.diagonal),
            "ADD": not self.local,
            "COLUMNS": covering_block(self.width),
        }
        use = self.use("linear_inner_query_gradient", DEPTH=inner)
        blocks = self.chunks * num_blocks(self.chunk, use["QUERIES"]) * num_blocks(inner, use["DEPTH"])
        self.launch(
            linear_inner_query_gradient,
            self.batch * self.heads * blocks,
            *(*shared, gradients[of_query], *sizes),
            use=use,
            **constants,
        )
        use = self.use("linear_inner_key_gradient", DEPTH=inner)
        blocks = self.chunks * num_blocks(self.chunk, use["KEYS"]) * num_blocks(inner, use["DEPTH"])
        self.launch(
            linear_inner_key_gradient,
            self.batch * self.key_heads * blocks,
            *(*shared, gradients[of_key], gradients["value"], *sizes),
            use=use,
            **constants,
        )
