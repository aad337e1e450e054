"""The comparison with the reference turns red when the chunked algorithm is broken on purpose, one part at a time."""

from pathlib import Path

import pytest
import torch

from ops.linear_cases import Case, assert_backends_agree
from ops.test_native import MUTANTS as NATIVE_MUTANTS
from polysketch.ops.linear import chunked, chunked_backward
from polysketch.ops.linear.packing import halves
from polysketch.ops.linear.piece import Piece
from polysketch.ops.linear.sums import Sums

WITH_LOCAL = Case(length=65)
SKETCHED_ONLY = Case(length=100, local_chunk=0, decays=True)
FACTORS = Case(length=100, local_chunk=0, power=1, factors=2)


def _prefix_zeroed(patch):
    read = Sums.read
    patch.setattr(Sums, "read", lambda self, query: tuple(part * 0 for part in read(self, query)))


def _state_one_chunk_late(patch):
    fold, waiting = Piece.fold, {}

    def late(self, sums, chunk):
        if id(sums) in waiting:
            fold(self, sums, waiting[id(sums)])
        waiting[id(sums)] = chunk

    patch.setattr(Piece, "fold", late)


def _denominator_dropped(patch):
    write = chunked._write_rows

    def without(piece, outputs, rows, numerator, denominator):
        write(piece, outputs, rows, numerator, torch.zeros_like(denominator))

    patch.setattr(chunked, "_write_rows", without)


def _diagonal_counted_twice(patch):
    weights = chunked._weights
    patch.setattr(chunked, "_weights", lambda *arguments: weights(*arguments) * 2)


def _off_diagonal_tiles_not_doubled(patch):
    patch.setattr(Sums, "_readable", lambda self: self.sums)


def _mask_one_token_wide(patch):
    patch.setattr(Piece, "mask_", lambda self, weights, rows: weights)


def _decay_forgotten_between_chunks(patch):
    patch.setattr(Sums, "decay", lambda self, factor: None)


def _gradient_of_sums_dropped(patch):
    patch.setattr(Sums, "add_read_gradient", lambda self, *arguments: None)


def _second_factor_dropped(patch):
    patch.setattr(chunked, "halves", lambda x, factors: halves(x, factors)[:1])


def _gradients_of_factors_exchanged(patch):
    weight_and_slopes = chunked_backward._weight_and_slopes

    def exchanged(*arguments):
        weight, slopes = weight_and_slopes(*arguments)
        return weight, slopes[::-1]

    patch.setattr(chunked_backward, "_weight_and_slopes", exchanged)


MUTANTS = {
    "prefix zeroed": (_prefix_zeroed, WITH_LOCAL),
    "prefix zeroed, no local part": (_prefix_zeroed, SKETCHED_ONLY),
    "state one chunk late": (_state_one_chunk_late, WITH_LOCAL),
    "denominator dropped": (_denominator_dropped, WITH_LOCAL),
    "diagonal counted twice": (_diagonal_counted_twice, WITH_LOCAL),
    "off-diagonal tiles not doubled": (_off_diagonal_tiles_not_doubled, WITH_LOCAL),
    "no causal mask": (_mask_one_token_wide, WITH_LOCAL),
    "decay forgotten between chunks": (_decay_forgotten_between_chunks, SKETCHED_ONLY),
    "gradient of the sums dropped": (_gradient_of_sums_dropped, WITH_LOCAL),
    "prefix zeroed, two factors": (_prefix_zeroed, FACTORS),
    "second factor dropped": (_second_factor_dropped, FACTORS),
    "gradients of factors exchanged": (_gradients_of_factors_exchanged, FACTORS),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_algorithm_is_caught(name, monkeypatch):
    mutate, case = MUTANTS[name]
    assert_backends_agree(case)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="relative errors beyond"):
        assert_backends_agree(case)


ELSEWHERE = {
    "prefix zeroed": ("prefix zeroed", "the prefix is not read"),
    "state one chunk late": ("first chunk never folded", "a chunk is folded before it is kept"),
    "denominator dropped": ("denominator dropped", "the denominator is not added up"),
    "diagonal counted twice": ("inside counted twice", "weights in a chunk count twice"),
    "off-diagonal tiles not doubled": ("pairs counted once", "off-diagonal products count once"),
    "no causal mask": ("no causal mask", "what a query sees ends one early"),
    "decay forgotten between chunks": ("decay forgotten between chunks", "sums do not decay"),
    "gradient of the sums dropped": ("gradient of the sums dropped", "gradients of denominators are lost"),
    "second factor dropped": ("second factor dropped", "the second factor is dropped"),
    "gradients of factors exchanged": ("gradients of factors exchanged", "gradients of factors are exchanged"),
}
"""What breaks the same part of the native and of the Triton backend, in their own tests (marker `full`)."""


@pytest.mark.parametrize("name", sorted({name.partition(", ")[0] for name in MUTANTS}))
def test_the_same_part_is_broken_in_the_other_backends_too(name):
    by_programs = (Path(__file__).parent / "triton" / "test_linear.py").read_text()
    native, triton = ELSEWHERE[name]
    assert native in NATIVE_MUTANTS
    assert f'"{triton}":' in by_programs
