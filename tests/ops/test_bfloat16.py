"""Products in bfloat16 on a CPU: what the instructions compute, and what the programs make of them."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.linear_cases import CPU, Case, make, run
from ops.test_native import sketch_and_gradients, with_mutant
from polysketch.feature_maps import LearnedSketch
from polysketch.models import fingerprint
from polysketch.ops.learned_sketch import native as native_sketch
from polysketch.ops.linear import native as native_attention
from polysketch.ops.native import bfloat16, build, why_unavailable
from polysketch.ops.native.bfloat16 import Instructions, Precision, product, products_in_bfloat16
from polysketch.ops.native.compiler import FLAGS, VECTOR_FLAGS

SOURCE = Path(build.__file__).parent / "source"
pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

HERE = [one for one in Instructions if one <= bfloat16.instructions()]
# Rows, depth and width: within one panel, in several, beside every edge of a tile.
SIZES = [(1, 1, 16), (5, 7, 32), (16, 32, 16), (17, 33, 48), (32, 64, 64), (70, 300, 80), (129, 256, 144)]


def factors(rows: int, depth: int, width: int, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A left and a right factor and a sum before; numbers halfway between two of bfloat16 among them."""
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn((depth, rows) if turned else (rows, depth), generator=generator)
    left.flatten()[::3] = 1 + 2**-8 + 2**-7 * torch.arange(left.numel())[::3].remainder(64)
    right = torch.randn(depth, width + 16, generator=generator)[:, :width]
    return left.T if turned else left, right, torch.randn(rows, width, generator=generator)


def exact(left: Tensor, right: Tensor) -> Tensor:
    return left.bfloat16().double() @ right.bfloat16().double()


@pytest.mark.parametrize("by", HERE, ids=lambda one: one.name)
@pytest.mark.parametrize("turned", [False, True], ids=["in rows", "in columns"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_factors_are_rounded_to_even_and_sums_are_in_float32(by, turned, size):
    left, right, before = factors(*size, turned)
    added = product(left, right, by, result=before.clone()) - before
    written = product(left, right, by, result=torch.full_like(before, torch.nan), add=False)
    bound = 1e-6 * (exact(left.abs(), right.abs()) + before.double().abs())
    for found in (added, written):
        assert ((found - exact(left, right)).abs() <= bound).all()
        assert not ((found - left.double() @ right.double()).abs() <= bound).all()


@pytest.mark.parametrize("by", HERE, ids=lambda one: one.name)
def test_what_additions_round_off_is_kept(by):
    left, right, _ = factors(17, 40, 32, turned=True)
    result, lost = torch.full((17, 32), 3e6), torch.zeros(17, 32)
    for _ in range(20):
        product(left, right, by, result=result, lost=lost)
    expected = 3e6 + 20 * exact(left, right)
    assert ((result.double() + lost - expected).abs() <= 1e-5 * 20 * exact(left.abs(), right.abs())).all()


@pytest.mark.parametrize("by", HERE, ids=lambda one: one.name)
def test_what_is_not_finite_stays_so(by):
    left, right, before = factors(16, 32, 16, turned=False)
    left[3, 5], left[7, 9], right[:, 4] = torch.nan, torch.inf, right[:, 4].abs()
    found = product(left, right, by, result=before)
    assert found[3].isnan().all()
    assert found[7, 4] == torch.inf
    assert found[[0, 1, 2, 4, 5, 6, 8]].isfinite().all()


CASES = {
    "power 1": Case(length=150, power=1, local_chunk=0),
    "power 1, few features": Case(length=100, power=1, local_chunk=0, features=32, value_dim=64, compute_chunk=64),
    "power 2": Case(length=150, local_chunk=0),
    "beside chunks": Case(length=150),
    "beside chunks, decay": Case(length=150, decays=True, padded=True),
    "two factors": Case(length=100, power=1, factors=2, local_chunk=0),
    "in both directions": Case(length=100, causal=False, local_chunk=0),
    "in blocks": Case(length=100, block_size=32),
    "not normalized": Case(length=100, normalize=False),
}


def attention(case: Case, dtype: torch.dtype, backend: str, in_bfloat16: bool) -> list[Tensor]:
    """Output and gradients of numbers that bfloat16 has."""
    tensors = make(case).map(lambda x: x if x.dtype == torch.bool else x.bfloat16().to(dtype).requires_grad_())
    with products_in_bfloat16(in_bfloat16):
        output = run(case, tensors, backend=backend).output
        upstream = torch.randn(output.shape, generator=torch.Generator(CPU).manual_seed(1)).bfloat16()
        return [output.detach(), *torch.autograd.grad(output, list(tensors.leaves().values()), upstream.to(dtype))]


def sketch(_: None, dtype: torch.dtype, backend: str, in_bfloat16: bool) -> list[Tensor]:
    """Features of the learned sketch, and gradients of x and all weights."""
    torch.manual_seed(0)
    networks = LearnedSketch(40, sketch_size=24, num_kv_heads=2, share="head").networks
    weights = [weight.detach().bfloat16().to(dtype) for one in networks for weight in one.weights()]
    x, upstream = torch.randn(2, 2, 70, 40).bfloat16().to(dtype), torch.randn(2, 2, 70, 24).bfloat16().to(dtype)
    with products_in_bfloat16(in_bfloat16):
        return sketch_and_gradients(x, weights, 2, upstream, backend)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def assert_errors_are_of_bfloat16(of, case) -> None:
    """At most twice those of the formula in PyTorch, or two roundings; and not those of products in float32."""
    expected = of(case, torch.float64, "chunked", False)
    plain, wide, found = (
        of(case, torch.bfloat16, *how) for how in (("chunked", False), ("native", False), ("native", True))
    )
    for index, one in enumerate(expected):
        assert found[index].dtype == torch.bfloat16
        bound = max(2 * error(plain[index], one), torch.finfo(torch.bfloat16).eps)
        assert error(found[index], one) <= bound, f"errors beyond bfloat16 at {index}"
        assert not torch.equal(found[index], wide[index])


@pytest.mark.parametrize("name", CASES)
def test_attention_errs_at_most_twice_as_much_as_by_the_formula(name):
    assert_errors_are_of_bfloat16(attention, CASES[name])


def test_the_learned_sketch_errs_at_most_twice_as_much_as_by_the_formula():
    assert_errors_are_of_bfloat16(sketch, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_multiplied_in_float32(dtype):
    for of, case in ((attention, CASES["beside chunks"]), (sketch, None)):
        always, never = (of(case, dtype, "native", used) for used in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(always, never, strict=True))


def test_the_processor_decides_unless_it_is_told(monkeypatch):
    x = torch.ones(1, dtype=torch.bfloat16)
    for one in Instructions:
        monkeypatch.setattr(bfloat16, "instructions", lambda one=one: one)
        gaining = Precision.BFLOAT16 if one == Instructions.AMX else Precision.FLOAT32
        assert bfloat16.precision(x) == gaining
        assert bfloat16.precision(x, gains=False) == Precision.FLOAT32
        assert bfloat16.precision(x, x.float()) == Precision.FLOAT32
        with products_in_bfloat16(False):
            assert bfloat16.precision(x) == Precision.FLOAT32
            with products_in_bfloat16(True):
                assert bfloat16.precision(x, gains=False) == Precision.BFLOAT16


def test_a_run_remembers_the_instructions_for_they_round_otherwise(monkeypatch):
    monkeypatch.setattr(fingerprint, "instructions", lambda: Instructions.PLAIN_VECTORS)
    plain = fingerprint.programs_fingerprint()
    monkeypatch.setattr(fingerprint, "instructions", lambda: Instructions.AMX)
    assert fingerprint.programs_fingerprint() == f"{plain}-amx"
    monkeypatch.setattr(fingerprint, "fingerprint", lambda: "none")
    assert fingerprint.programs_fingerprint() == "none"


@pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="no g++ for x86-64")
@pytest.mark.parametrize(("file", "instruction"), [("bfloat16_avx512", "vdpbf16ps"), ("bfloat16_amx", "tdpbf16ps")])
def test_programs_for_avx_512_have_the_instructions(file, instruction):
    command = ["g++", *FLAGS, *VECTOR_FLAGS["AVX512"], "-S", "-o", "-", str(SOURCE / f"{file}.cpp")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert instruction in found.stdout, found.stderr


def assert_products_by_plain_vectors_are_right() -> None:
    for size in SIZES:
        for turned in (False, True):
            test_factors_are_rounded_to_even_and_sums_are_in_float32(Instructions.PLAIN_VECTORS, turned, size)
    test_what_is_not_finite_stays_so(Instructions.PLAIN_VECTORS)


PANELS, PLAIN = "bfloat16_panels.h", "bfloat16_plain.cpp"
MUTANTS = {
    "ties go up": (PLAIN, "0x7fffu + ((bits >> 16) & 1u)", "0x8000u"),
    "rounded towards zero": (PLAIN, "(bits + 0x7fffu + ((bits >> 16) & 1u))", "bits"),
    "what is no number is rounded": (PLAIN, "& ~none) | (0x7fc00000u & none)", "& ~none)"),
    "the second of a pair forgotten": (PLAIN, "sum += (Vector)(a & 0xffff0000u)", "sum += 0 * (Vector)(a & 1u)"),
    "a later panel replaces an earlier one": (PANELS, "add || k);", "add);"),
    "an odd depth loses its last": (PANELS, "2 * pair < depth ?", "2 * pair + 1 < depth ?"),
    "rows of the first panel alone": (PANELS, "{a.data + m * a.row + k", "{a.data + k"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_product_is_caught(name, monkeypatch, tmp_path):
    broken = with_mutant(*MUTANTS[name], tmp_path)
    monkeypatch.setattr(bfloat16, "library", lambda: broken)
    with pytest.raises(AssertionError):
        assert_products_by_plain_vectors_are_right()


PROGRAM_MUTANTS = {
    "unseen weights counted": (
        "linear_attention.cpp",
        "keep(weight, at_least(query, from))",
        "weight",
        "beside chunks",
    ),
    "sums in float32": ("sums.h", "precision_(precision)", "precision_(kFloat32)", "in both directions"),
    "sums of gradients in float32": (
        "linear_attention_backward.cpp",
        "carried_(expansion_, call.value_width, call.precision)",
        "carried_(expansion_, call.value_width)",
        "power 1",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAM_MUTANTS)
def test_a_program_that_is_broken_for_bfloat16_is_caught(name, monkeypatch, tmp_path):
    *change, case = PROGRAM_MUTANTS[name]
    broken = with_mutant(*change, tmp_path)
    for module in (native_attention, native_sketch):
        monkeypatch.setattr(module, "library", lambda: broken)
    with pytest.raises(AssertionError):
        assert_errors_are_of_bfloat16(attention, CASES[case])
