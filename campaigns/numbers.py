"""Random mechanisms, shapes, precisions and layouts against float64, row by row; and the same bits twice.

    python -m campaigns.numbers --count 5000 --seed 0

Case number n of seed s is what `--count 1 --seed s+n` runs alone. The reference is the same mechanism in float64, one
row at a time, without padding, masks or splits, contiguous, with one thread, and of the op its quadratic definition.
Against it stand, in the drawn precision: the padded batch with garbage at its padding, with gradients of inputs and
parameters; decoding over random splits; the rows as documents of one packed row; other layouts in memory; two threads.
What is a fault: a difference beyond the bound, a number that is not finite, other bits in a second run, or an error.
What differs in the last bits between layouts, between thread counts, or of a row alone and in its batch is counted.

After these come long cases, one for every 400: `ops.linear_attention` of 300,000 tokens in float32, by the backend
native with one thread and two and by chunked, against float64, with gradients. They are the 12 of `LONG`, from number
s of seed s on: power 1, then 2; random values, then such that a query's gradient is a small difference of large
numbers; no decay, a slow one, a strong one. `--only drawn` or `--only long` runs one kind alone.

The bounds, `BOUNDS` and `BOUNDS_OF_GRADIENTS`: the norm of the difference is at most so many times the norm of what is
expected. A small gradient may be a difference of large numbers, so the norm counts for as much as a share of the
largest gradient's at least, `_LEAST`. What is beyond a bound is no fault where numbers of this precision do not say
more: where float64 itself, for inputs and parameters that are rounded once more, changes by half of the error or more.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor

from campaigns.drawn import LAYOUTS, OP, Drawn, draw, is_resolved
from campaigns.harness import Found, main
from polysketch import ops

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
BOUNDS_OF_GRADIENTS = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_TOKENS = 300_000
_DRAWN_FOR_EACH_LONG = 400
_ROUNDINGS = 6
_TIMES_A_ROUNDING = 2.0
_LEAST = {torch.float64: 1e-3, torch.float32: 0.1, torch.bfloat16: 1.0, torch.float16: 1.0}


def expected(case: Drawn) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of inputs and parameters, by rows alone in float64."""
    outputs, gradients = [], []
    module, upstream = deepcopy(case.module), _upstream(case)
    for row, length in enumerate(case.lengths):
        leaves = [x[row : row + 1].narrow(-2, 0, length).clone().requires_grad_() for x in case.inputs]
        output = module(*leaves[:3], causal=case.causal, hidden=leaves[3])
        found = _gradients(output, upstream[row : row + 1, :, :length], [*leaves, *module.parameters()])
        outputs.append(output.detach())
        gradients.append(found)
    inputs = [_joined(list(rows), case) for rows in zip(*(found[:4] for found in gradients), strict=True)]
    parameters = [sum(rows, torch.zeros(())) for rows in zip(*(found[4:] for found in gradients), strict=True)]
    return _joined(outputs, case), inputs + parameters


def forward(
    case: Drawn, layout: Callable[[Tensor], Tensor] | None = None, upstream: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The same by the padded batch in the drawn precision; zeros at padding."""
    module, real = _module(case), case.real
    leaves = [x.requires_grad_() for x in _given(case)]
    laid = leaves if layout is None else [*map(layout, leaves[:3]), leaves[3]]
    mask = None if real.all() else real
    output = module(*laid[:3], causal=case.causal, key_mask=mask, hidden=laid[3])
    wanted = _placed(_upstream(case) if upstream is None else upstream, case, 0.0).to(output.dtype)
    gradients = _gradients(output, wanted, [*leaves, *module.parameters()])
    return _without_padding(output.detach(), real), gradients


def decoded(case: Drawn) -> Tensor:
    """The output of decoding, span after span."""
    module, given, real = _module(case), _given(case), case.real
    dtype = torch.float64 if case.dtype == torch.float64 else None  # sums are float32 at least
    state, outputs = module.init_state(len(case.lengths), dtype=dtype, value_dim=case.heads[3]), []
    edges = [0, *case.cuts, max(case.lengths)]
    for start, stop in pairwise(edges):
        part = [x.narrow(-2, start, stop - start) for x in given]
        mask = None if real.all() else real[:, start:stop]
        output, state = module.extend(*part[:3], state, key_mask=mask, hidden=part[3])
        outputs.append(output)
    return _without_padding(torch.cat(outputs, 2), real)


def packed(case: Drawn) -> Tensor:
    """The output of all rows as documents of one row."""
    module = _module(case)
    rows = list(enumerate(case.lengths))
    given = [
        torch.cat([x[row : row + 1].narrow(-2, 0, length) for row, length in rows], -2).to(case.dtype)
        for x in case.inputs
    ]
    offsets = torch.tensor([0, *case.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        output = module.forward_packed(*given[:3], offsets, causal=case.causal, hidden=given[3])
    return _joined(list(output.split(case.lengths, 2)), case)


def attack(seed: int, found: Found) -> None:
    """One case."""
    case = draw(seed)
    try:
        faults = list(_faults(case, found))
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        faults = [f"{type(error).__name__}: {error}"]
    for fault in faults:
        found.add(f"--seed {seed}, {case}", fault, is_fault=True)
    if not faults:
        found.add(str(case), case.name)


@dataclass(frozen=True)
class Long:
    """One long case: one head of 8 positive features, values of 4 numbers, float32.

    Attributes:
        power: of the weights.
        cancelling: whether values are in [1, 2] and the upstream gradient is one slow wave. Then outputs hardly change
            from token to token, and a query's gradient is the difference of two large sums.
        decay: of a token.
    """

    power: int
    cancelling: bool
    decay: float

    def draw(self, seed: int, tokens: int) -> tuple[list[Tensor], Tensor]:
        """Query, key and value, and the gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        query, key, value, upstream = (torch.randn(1, 1, tokens, width, generator=generator) for width in (8, 8, 4, 4))
        if self.cancelling:
            value = 1 + torch.rand(value.shape, generator=generator)
            upstream = torch.linspace(0, 2 * torch.pi, tokens).cos()[:, None].expand_as(value).contiguous()
        return [query.abs(), key.abs(), value], upstream


LONG = [Long(*case) for case in product((1, 2), (False, True), (0.0, 1e-5, 1.0))]


def attack_long(case: Long, seed: int, found: Found, tokens: int = _TOKENS) -> None:
    """One long case, by every backend."""
    inputs, upstream = case.draw(seed, tokens)
    wanted = _expected_at_length(case, inputs, upstream)
    faults = []
    for backend, threads in (("native", 1), ("native", 2), ("chunked", 1)):
        torch.set_num_threads(threads)
        output, *gradients = _attended(lambda *x, name=backend: _output(case, *x, backend=name), inputs, upstream)
        faults += _differences(f"{backend}, forward", [output], wanted[:1], torch.float32)
        faults += _differences(f"{backend}, gradient", gradients, wanted[1:], torch.float32, BOUNDS_OF_GRADIENTS)
        _note_errors(case, [output, *gradients], wanted, found)
    alone = f"--only long --count {_DRAWN_FOR_EACH_LONG} --seed {seed}"
    for fault in faults:
        found.add(f"{alone}, {case}, {tokens} tokens", fault, is_fault=True)
    if not faults:
        found.add(str(case), f"{tokens} tokens")


def campaign(count: int, seed: int, folder: Path, only: Sequence[str] = ("drawn", "long")) -> Found:
    """So many cases, and long ones after them; the folder is not used."""
    found, threads = Found(), torch.get_num_threads()
    try:
        for number in range(seed, seed + count if "drawn" in only else seed):
            attack(number, found)
        for number in range(seed, seed + count // _DRAWN_FOR_EACH_LONG if "long" in only else seed):
            attack_long(LONG[number % len(LONG)], number, found)
    finally:
        torch.set_num_threads(threads)
    return found


def _expected_at_length(case: Long, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients in float64: by cumulative sums where they hold the case, else by the chunked backend."""
    torch.set_num_threads(1)
    summed = case.power == 1 and case.decay < 1e-3  # else too many features, or powers beyond the range
    attend = _by_cumulative_sums if summed else _output
    return _attended(lambda *x: attend(case, *x), [x.double() for x in inputs], upstream.double())


def _attended(attend: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = attend(*leaves)
    return [output.detach(), *_gradients(output, upstream, leaves)]


def _output(case: Long, query: Tensor, key: Tensor, value: Tensor, backend: str = "chunked") -> Tensor:
    decay = torch.full(key.shape[:3], -case.decay, dtype=key.dtype) if case.decay else None
    return ops.linear_attention(
        query, key, value, power=case.power, causal=True, log_decay=decay, backend=backend
    ).output


def _by_cumulative_sums(case: Long, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition at power 1: what a token's decay takes from all before it cancels, but for keys that grow."""
    grown = key * (case.decay * torch.arange(key.shape[2], dtype=key.dtype)).exp()[:, None]
    numerator = query[..., None, :] @ (grown[..., :, None] * value[..., None, :]).cumsum(2)
    return numerator[..., 0, :] / (query * grown.cumsum(2)).sum(-1, keepdim=True)


def _note_errors(case: Long, tensors: list[Tensor], wanted: list[Tensor], found: Found) -> None:
    """The largest errors so far, each as a share of the norm of what is expected."""
    kind = "cancelling" if case.cancelling else "random"
    for name, one, other in zip(("output", "query", "key", "value"), tensors, wanted, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        name = f"{name}, {kind}"
        found.figures[name] = max(found.figures.get(name, 0.0), float(f"{error:.1e}"))


def _faults(case: Drawn, found: Found) -> list[str]:
    """What is wrong, in words."""
    torch.set_num_threads(1)
    wanted, wanted_gradients = expected(case)
    if max(float(x.abs().max()) for x in (wanted, *wanted_gradients)) > torch.finfo(case.dtype).max:
        found.outcomes["beyond the range of the precision"] += 1
        return []
    if not is_resolved(case):
        found.outcomes["below the resolution at power 2"] += 1
        return []
    faults = _compared(case, found, wanted, wanted_gradients)
    if not faults:
        return []
    resolved = _compared(case, Found(), wanted, wanted_gradients, changed_by_roundings(case, wanted, wanted_gradients))
    if not resolved:
        found.outcomes["beyond a bound, as by a rounding of the inputs"] += 1
    return resolved


def changed_by_roundings(case: Drawn, wanted: Tensor, gradients: list[Tensor]) -> list[float]:
    """How far float64's output and gradients move, as errors are measured, where all it is given is rounded anew."""
    generator, size = torch.Generator().manual_seed(0), torch.finfo(case.dtype).eps / 2

    def rounded(x: Tensor) -> Tensor:
        return x * (1 + size * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    changes = []
    for _ in range(_ROUNDINGS):
        module = deepcopy(case.module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(rounded(parameter))
        output, found = expected(replace(case, inputs=[rounded(x) for x in case.inputs], module=module))
        changes.append([*_errors([output], [wanted], case.dtype), *_errors(found, gradients, case.dtype)])
    return [max(each) for each in zip(*changes, strict=True)]


def _compared(
    case: Drawn, found: Found, wanted: Tensor, wanted_gradients: list[Tensor], changed: Sequence[float] = ()
) -> list[str]:
    """What is wrong, in words; `changed` is what roundings change, of the output and of every gradient."""

    def differ(what: str, one: Tensor, gradients: list[Tensor] | None = None) -> list[str]:
        bounds = [BOUNDS[case.dtype], *[BOUNDS_OF_GRADIENTS[case.dtype]] * len(wanted_gradients)]
        if changed:
            bounds = [max(bound, _TIMES_A_ROUNDING * moved) for bound, moved in zip(bounds, changed, strict=True)]
        name = f"{what}, forward" if what else "forward"
        faults = _beyond(name if gradients is not None else what, _errors([one], [wanted], case.dtype), bounds[:1])
        if gradients is not None:
            name = f"{what}, gradient" if what else "gradient"
            faults += _beyond(name, _errors(gradients, wanted_gradients, case.dtype), bounds[1:])
        return faults

    output, gradients = forward(case)
    faults = differ("", output, gradients)
    if not _same(forward(case), (output, gradients)):
        faults.append("a second run has other bits")
    for name, other in _other_ways(case):
        if not _same(other, (output, gradients)):
            found.outcomes[f"other last bits, {name}: {case.name}"] += 1
            faults += differ(name, *other)
    if case.name != OP and _can_be_compared(case):
        if case.causal:
            faults += differ("decoding", decoded(case))
        faults += differ("packed", packed(case))
    return faults


def _other_ways(case: Drawn) -> Iterator[tuple[str, tuple[Tensor, list[Tensor]]]]:
    """What ought to have the same bits, or at least the same numbers."""
    yield case.layout, forward(case, LAYOUTS[case.layout])
    torch.set_num_threads(2)
    threaded = forward(case)
    torch.set_num_threads(1)
    yield "two threads", threaded
    if len(set(case.lengths)) == 1 < len(case.lengths):
        yield "rows apart", _rows_apart(case)


def _rows_apart(case: Drawn) -> tuple[Tensor, list[Tensor]]:
    """As `forward`, each row a batch by itself."""
    found = []
    for row in range(len(case.lengths)):
        inputs = [x[row : row + 1] for x in case.inputs]
        found.append(
            forward(replace(case, lengths=case.lengths[:1], inputs=inputs), upstream=_upstream(case)[row, None])
        )
    each = list(zip(*(gradients for _, gradients in found), strict=True))
    gradients = [torch.cat(x) for x in each[:4]] + [sum(x[1:], x[0]) for x in each[4:]]
    return torch.cat([output for output, _ in found]), gradients


def _can_be_compared(case: Drawn) -> bool:
    """Decoding is exact where HyperAttention's forward leaves out keys."""
    return case.name != "hyper"


def _differences(
    what: str, found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype, bounds: dict[torch.dtype, float] = BOUNDS
) -> list[str]:
    """Those beyond the bound."""
    return _beyond(what, _errors(found, wanted, dtype), [bounds[dtype]] * len(wanted))


def _errors(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> list[float]:
    """Each as a share of the norm of what is expected."""
    least = max(1e-3, _LEAST[dtype] * max(float(x.norm()) for x in wanted))
    return [
        float((one.double() - other).norm() / (other.norm() + least)) for one, other in zip(found, wanted, strict=True)
    ]


def _beyond(what: str, errors: Sequence[float], bounds: Sequence[float]) -> list[str]:
    return [
        f"{what} {number}: error {error:.1e}"
        for number, (error, bound) in enumerate(zip(errors, bounds, strict=True))
        if not error <= bound
    ]


def _same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for x, y in zip([one[0], *one[1]], [other[0], *other[1]], strict=True))


def _module(case: Drawn) -> torch.nn.Module:
    """In the drawn precision."""
    module = deepcopy(case.module).to(case.dtype)
    if case.name == OP:
        module.backend = case.backend
    return module


def _given(case: Drawn) -> list[Tensor]:
    """The padded inputs, with garbage at padding."""
    garbage = [case.garbage] * 3 + [0.0 if case.name == OP else case.garbage]  # a decay of 50 is refused
    return [_placed(x, case, number).to(case.dtype) for x, number in zip(case.inputs, garbage, strict=True)]


def _placed(x: Tensor, case: Drawn, padding: float) -> Tensor:
    """Rows, which begin at the first place, where they belong in the padded batch."""
    rows = torch.full_like(x, padding)
    for row, length in enumerate(case.lengths):
        start = max(case.lengths) - length if case.before else 0
        rows[row].narrow(-2, start, length).copy_(x[row].narrow(-2, 0, length))
    return rows


def _joined(rows: list[Tensor], case: Drawn) -> Tensor:
    """Rows of unlike lengths, each (1, ..., length, width), as a padded batch with zeros at padding."""
    longest = max(case.lengths)
    wide = torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[-2])) for x in rows])
    return _placed(wide, case, 0.0)


def _without_padding(x: Tensor, real: Tensor) -> Tensor:
    return x.masked_fill(~real[:, None, :, None], 0.0)


def _upstream(case: Drawn) -> Tensor:
    """The gradient of the output, for rows that begin at the first place."""
    lead, heads, longest = len(case.lengths), case.heads[0], max(case.lengths)
    drawn = torch.randn(lead, heads, longest, case.heads[3], generator=torch.Generator().manual_seed(0))
    return drawn.to(case.dtype).double()


def _gradients(output: Tensor, upstream: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output, leaves, upstream, allow_unused=True, materialize_grads=True))


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 2000, argv, parts=("drawn", "long"))


if __name__ == "__main__":
    sys.exit(run())
