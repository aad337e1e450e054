"""What the contract tests run on: for every mechanism, options at which each of its parts carries weight.

A mechanism is here by being in the table: its class gives `examples` of options. A `Case` says more where that is not
enough.
"""

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from polysketch import attention

_BUILT: dict[Hashable, tuple[attention.Mechanism, Tensor]] = {}

BATCH, HEADS, HEAD_DIM, LENGTH, HIDDEN = 2, 4, 8, 37, 6


def forget() -> None:
    """What was built is built anew: for a test that changes how mechanisms are made, before and after it."""
    _BUILT.clear()


@dataclass(frozen=True)
class Case:
    """One mechanism with its options.

    Attributes:
        name: in `attention.MECHANISMS`.
        options: for `attention.build`.
        kv_heads: key and value heads.
        norm_scale: scale of the query norm, where there is one: how the local part is brought down to the prefix when
            nothing calibrates it.
        lean: added to every entry of queries and keys, where weights of zero would hide tokens.
        first_sees: how many tokens the first one sees without `causal`, itself included.
        last_sees: how many the last one of `LENGTH` sees.
        widest_head: the widest head the options are for, or that is cheap enough to run; None for any.
        not_smooth: why gradients by differences do not apply, where they do not.
        leaves_out: whether forward leaves out tokens that decoding sees, and jumps where the hash of one changes.
        draws_matter: whether another draw of the saved random numbers gives another function.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = HEADS
    norm_scale: float = 1.0
    lean: float = 0.0
    first_sees: int = LENGTH
    last_sees: int = LENGTH
    widest_head: int | None = None
    not_smooth: str = ""
    leaves_out: bool = False
    draws_matter: bool = True

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items() if key != "hidden_size")
        return f"{self.name} {options} kv={self.kv_heads}"

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> attention.Mechanism:
        """The mechanism, its norms and its identities moved away from where they start, calibrated where it can be.

        A copy of one that was made before, if there is one: tests build thousands. The state of the global generator is
        that after building either way.
        """
        mechanism, state = self._built(seed, dtype, changes)
        torch.set_rng_state(state)
        return copy.deepcopy(mechanism)

    @property
    def example(self) -> attention.Mechanism:
        """The mechanism that copies are made of: to be asked what it can, thousands of times, and not to be changed."""
        return self._built(0, torch.float64, {})[0]

    def _built(self, seed: int, dtype: torch.dtype, changes: dict[str, Any]) -> tuple[attention.Mechanism, Tensor]:
        asked = (attention.MECHANISMS[self.name], repr(self), seed, dtype, *sorted(changes.items()))
        if asked not in _BUILT:
            _BUILT[asked] = self._build(seed, dtype, changes), torch.get_rng_state()
        return _BUILT[asked]

    def _build(self, seed: int, dtype: torch.dtype, changes: dict[str, Any]) -> attention.Mechanism:
        torch.default_generator.manual_seed(
            seed
        )  # those of GPUs, which `torch.manual_seed` sets too, take a millisecond
        sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "num_kv_heads": self.kv_heads, **changes}
        mechanism = attention.build(self.name, **sizes, **self.options).to(dtype)
        for name, parameter in mechanism.named_parameters():
            if "norm" in name or self.name == "hedgehog":
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        if getattr(mechanism, "query_norm", None) is not None:
            mechanism.query_norm.weight.data.mul_(self.norm_scale)
            mechanism.query_norm.bias.data.mul_(self.norm_scale)
        kinds = {"heads": sizes["num_heads"], "kv_heads": sizes["num_kv_heads"], "head_dim": sizes["head_dim"]}
        query, key, _, hidden = self.inputs(dtype=dtype, **kinds)
        mechanism.calibrate(query, key, hidden=hidden)
        return mechanism

    def inputs(
        self,
        *,
        seed: int = 1,
        dtype: torch.dtype = torch.float64,
        batch: int = BATCH,
        length: int = LENGTH,
        heads: int = HEADS,
        kv_heads: int | None = None,
        head_dim: int = HEAD_DIM,
        value_dim: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and hidden; keys lean towards each other so that weights differ in size."""
        generator = torch.Generator().manual_seed(seed)
        kv_heads = self.kv_heads if kv_heads is None else kv_heads
        value_dim = head_dim if value_dim is None else value_dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        return (
            draw(batch, heads, length, head_dim) + self.lean,
            draw(batch, kv_heads, length, head_dim) + self.lean,
            draw(batch, kv_heads, length, value_dim),
            draw(batch, length, HIDDEN),
        )


def polysketch(kv_heads: int = HEADS, norm_scale: float = 1.0, **options: Any) -> Case:
    """A small polysketch case whose local chunks are far shorter than the sequence."""
    return Case("polysketch-paper", {"sketch_size": 6, "local_chunk": 8, **options}, kv_heads, norm_scale)


def heavy(kv_heads: int = HEADS, **options: Any) -> Case:
    """Polysketch with heavy entries; sketched weights, those of a chunk and of heavy entries hold a third each."""
    options = {"sketch_size": 6, "local_chunk": 8, "heavy_size": 6, "hash_bits": 2, "prefix_gain": 0.4, **options}
    return Case("polysketch-heavy", options, kv_heads)


# Those that need other inputs, norms or expectations than their class can say; every other mechanism is tested by its
# `examples`.
CASES = [
    Case("softmax"),
    Case("softmax", kv_heads=2),
    Case("polynomial"),
    Case("polynomial", {"degree": 2}, kv_heads=1),
    polysketch(norm_scale=0.17),
    polysketch(prefix_gain=0.5, kv_heads=2),
    polysketch(prefix_gain=0.5, learned=False),
    polysketch(prefix_gain=0.5, share="head", kv_heads=2, sketch_expansion=3),
    polysketch(prefix_gain=0.5, kv_heads=2, degree=8, sketch_depth=1, sketch_activation="relu"),
    polysketch(prefix_gain=0.5, sketch_depth=3, sketch_activation="silu"),
    polysketch(prefix_gain=0.5, learned=False, share="head", degree=8, kv_heads=2),
    polysketch(local_chunk=None),
    polysketch(local_chunk=None, learned=False, kv_heads=2),
    polysketch(local_chunk=None, decay_gate=True, hidden_size=HIDDEN),
    # Gating spreads the gains over nine powers of e: shares that end near a half again.
    polysketch(prefix_gain=(0.5, 0.99987), decay_gate=True, hidden_size=HIDDEN, kv_heads=2),
    polysketch(prefix_gain=0.5, learned=False, degree=2),
    Case("sliding-window", {"window": 9}, first_sees=9, last_sees=9),
    Case("sliding-window", {"window": 1024}, kv_heads=2),
    Case("local", {"local_chunk": 8}, norm_scale=0.2, first_sees=8, last_sees=LENGTH % 8),
    Case("local", {"local_chunk": 8, "degree": 2}, kv_heads=1, norm_scale=0.2, first_sees=8, last_sees=LENGTH % 8),
    Case("local", {"local_chunk": 1024}, kv_heads=2),
    Case("nystrom", {"num_landmarks": 6}),
    Case("nystrom", {"num_landmarks": 64}, kv_heads=2),
    Case("skyformer", {"num_landmarks": 7}),
    Case("skyformer", {"num_landmarks": 40}, kv_heads=2),
    polysketch(prefix_gain=0.5, learned=False, projection="srht", redraw_interval=3),
    polysketch(local_chunk=None, learned=False, projection="srht", degree=8, share="head", kv_heads=2),
    Case("llops", {"num_features": 24}),
    Case("llops", {"num_features": 24, "degree": 3, "rank": 2}, kv_heads=2),
    Case("llops", {"num_features": 24, "degree": 2, "nonnegative": True, "normalize": True}, kv_heads=2),
    Case("linear"),
    Case("linear", {"kind": "relu"}, kv_heads=1, lean=1.0),
    Case("linear", {"kind": "squared-relu"}, kv_heads=2, lean=1.0),
    Case("performer", {"num_features": 20}, kv_heads=2),
    Case("performer", {"num_features": 20, "kind": "relu"}),
    Case("performer", {"num_features": 16, "local_chunk": 8, "redraw_interval": 3}, kv_heads=2),
    Case("performer", {"num_features": 16, "local_chunk": 12}),
    Case("focused"),
    Case("focused", {"focus": 2.0, "convolution_size": 3}, kv_heads=2, lean=1.0),
    Case("polarity", {"output_gate": True, "hidden_size": HIDDEN}),
    Case("polarity", {"convolution_size": 3}, kv_heads=2),
    Case("based", {"feature_dim": 5}),
    Case("based", kv_heads=2),
    Case("hedgehog"),
    Case("hedgehog", {"num_features": 24}, kv_heads=2, widest_head=12),
    Case("symmetric-power", norm_scale=0.3),
    Case("symmetric-power", {"degree": 4}, kv_heads=2, norm_scale=0.3, widest_head=16),
    Case("squared-polynomial", kv_heads=2, norm_scale=0.3),
    Case("squared-polynomial", {"coefficients": (0.7, -1.1, 0.4)}, norm_scale=0.3),
    Case("squared-polynomial", {"coefficients": 2, "learned": True}, kv_heads=1, norm_scale=0.3),
    Case("squared-polynomial", {"coefficients": (0.7, -1.1, 0.4), "linear": True}, norm_scale=0.3, widest_head=16),
    Case("squared-polynomial", {"coefficients": 3, "linear": True, "sketch_size": 8}, kv_heads=2, norm_scale=0.3),
    Case("squared-polynomial", {"coefficients": 1, "learned": True, "linear": True}, kv_heads=2, norm_scale=0.3),
    # Enough samples for every token: sorted chunks and samples together are softmax attention.
    Case("hyper", {"min_length": 8, "chunk_size": 12, "sample_size": 1024}, kv_heads=2, draws_matter=False),
    Case("hyper", {"min_length": 8, "chunk_size": 4, "sample_size": 5}, kv_heads=2, leaves_out=True),
    Case(
        "hyper",
        {"min_length": 8, "chunk_size": 4, "sample_size": 5, "sampling": "norm"},
        leaves_out=True,
        not_smooth="the weights of samples drawn by the norms of values are constants to the backward pass",
    ),
    Case(
        "hyper",
        {"min_length": 8, "chunk_size": 4, "sample_size": 5, "capping": (1.0, 2.0)},
        kv_heads=2,
        leaves_out=True,
        not_smooth="bounds found from other rows are constants to the backward pass",
    ),
    heavy(),
    heavy(learned=False, degree=2, kv_heads=1),
    heavy(learned=False, kv_heads=2, redraw_interval=3),
    heavy(hash_bits=3, heavy_size=8, share="head", kv_heads=2),
]


def examples_of(name: str) -> list[Case]:
    """The cases of a mechanism by its own `examples`, all heads with keys of their own and then in groups."""
    hidden = {"hidden_size": HIDDEN} if "hidden_size" in attention.option_names(name) else {}
    examples = attention.mechanism_class(name).examples
    return [Case(name, {**options, **hidden}, kv_heads) for options in examples for kv_heads in (HEADS, 2)]


NAMED = {case.name for case in CASES}
CASES += [case for name in attention.MECHANISMS if name not in NAMED for case in examples_of(name)]


def told_by(case: Case) -> set[tuple]:
    """What a case shows of its mechanism: its options, numbers by name alone, and what tests leave it out of."""
    kinds = {key: type(value) if type(value) in (int, float, tuple) else value for key, value in case.options.items()}
    kinds |= {name: bool(getattr(case, name)) for name in ("leaves_out", "not_smooth", "widest_head")}
    return {("grouped", case.kv_heads < HEADS), *((case.name, *item) for item in kinds.items())}


def represented(cases: list[Case]) -> list[Case]:
    """Few cases that tell all that these tell. Greedy: next the one that tells most, the earliest of several."""
    found = [polysketch(prefix_gain=0.5, kv_heads=2)]  # the library's own, as it is by default
    missing = set().union(*map(told_by, cases)) - told_by(found[0])
    while missing:
        found.append(max(cases, key=lambda case: len(told_by(case) & missing)))
        missing -= told_by(found[-1])
    return found


REPRESENTED = represented(CASES)


def marks_of(case: Case) -> list:
    """A case that represents a mechanism and its options runs always, another in the full product."""
    return [] if case in REPRESENTED else [pytest.mark.full]


def others_full(cases: list[Case]) -> list:
    """Cases as parameters of a test."""
    return [pytest.param(case, marks=marks_of(case)) for case in cases]


def directions(case: Case) -> list[bool]:
    """The values of `causal` that the mechanism takes: landmarks are not causal, a decay over tokens is."""
    mechanism = case.example
    return [True] * mechanism.is_causal + [False] * mechanism.is_bidirectional


def first_of_each(cases: list[Case]) -> dict[str, Case]:
    """The first case of every mechanism: of those that represent it, the one that tells most."""
    return {case.name: case for case in reversed(cases)}


def one_of_each(cases: list[Case]) -> list:
    """Cases as parameters of a test of what does not depend on options: one of each mechanism runs always."""
    one = first_of_each([case for case in REPRESENTED if case in cases])
    return [pytest.param(case, marks=[] if case == one.get(case.name) else [pytest.mark.full]) for case in cases]


def directed(cases: list[Case], *, every: bool = True) -> list:
    """Each case with each value of `causal` that it takes; of a mechanism that takes both, False in one case always.

    Args:
        cases: the cases.
        every: whether causal attention always runs with every case that represents a mechanism, or with one.
    """
    both = [case for case in REPRESENTED if len(directions(case)) == 2]
    one_without_order, one = first_of_each(both), first_of_each(REPRESENTED)

    def marks(case: Case, causal: bool) -> list:
        if case in both and not causal:
            is_other = case != one_without_order[case.name]
        else:
            is_other = not every and case != one[case.name]
        return [pytest.mark.full] if is_other else marks_of(case)

    return [
        pytest.param(case, causal, id=f"{case} causal={causal}", marks=marks(case, causal))
        for case in cases
        for causal in directions(case)
    ]


CAUSAL_CASES = [case for case in CASES if attention.mechanism_class(case.name).is_causal]
COMPLETE_CASES = [case for case in CASES if not case.leaves_out]
COMPLETE_CAUSAL_CASES = [case for case in CAUSAL_CASES if not case.leaves_out]
