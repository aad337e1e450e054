"""The native programs compute what the references define, and are avoided, or refused, where they cannot run."""

import ctypes
import os
import shutil
import stat
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from attention.covering import first_always
from attention.test_one_token import CASES as ONE_TOKEN
from attention.test_one_token import assert_exact as assert_one_token_is_exact
from ops.linear_cases import (
    Case,
    arguments,
    assert_precision_agrees,
    empty_state,
    gradients,
    make,
    relative_error,
    run,
)
from ops.test_linear_backends import PAIRWISE, WITH_HISTORY
from ops.test_polynomial_native import CASES as POLYNOMIALS
from ops.test_polynomial_native import assert_agrees as assert_polynomial_agrees
from ops.test_window_native import CASES as WINDOWS
from ops.test_window_native import assert_all_agree
from polysketch import ops
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.delta import native as native_delta
from polysketch.ops.delta import one_token
from polysketch.ops.hyper import native as native_hyper
from polysketch.ops.learned_sketch import learned_sketch, learned_sketch_backend
from polysketch.ops.learned_sketch import native as native_sketch
from polysketch.ops.linear import native as native_attention
from polysketch.ops.low_rank_sketch import native as native_low_rank
from polysketch.ops.native import build, library, why_unavailable
from polysketch.ops.native.trusted import find_trusted
from polysketch.ops.polynomial import native as native_polynomial
from polysketch.ops.random_features import native as native_random
from polysketch.ops.window import native as native_window

SOURCE = Path(build.__file__).parent / "source"
WIDE = [
    Case(local_chunk=300, length=700, features=33, head_dim=70, value_dim=64, batch=1, key_heads=1),
    Case(local_chunk=0, length=700, features=33, value_dim=70, decays=True, compute_chunk=None),
    Case(local_chunk=0, length=1300, features=7, value_dim=5, compute_chunk=None, batch=1),
    Case(power=1, local_chunk=0, length=300, features=600, value_dim=64, batch=1, key_heads=4),
    Case(power=1, local_chunk=0, length=70, features=8, value_dim=64, batch=1, key_heads=2),
    Case(power=1, local_chunk=0, length=70, features=4096, value_dim=5, batch=1, heads=2, key_heads=1),
    Case(power=1, local_chunk=0, length=40, features=4096, value_dim=64, batch=1, heads=1, key_heads=1, decays=True),
    Case(power=1, local_chunk=0, length=96, features=32, value_dim=64),
    Case(power=1, local_chunk=0, length=200, features=64, value_dim=16, key_heads=4, compute_chunk=64, decays=True),
    Case(power=1, local_chunk=0, length=100, features=16, compute_chunk=64, block_size=5, padded=True),
    Case(causal=False, local_chunk=48, length=331, features=33, head_dim=70, value_dim=70, key_heads=1, padded=True),
    Case(causal=False, local_chunk=32, power=1, length=130, features=40, batch=1, normalize=False),
    Case(block_size=96, local_chunk=32, length=331, features=12, heads=6, padded=True),
]

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


assert_native_agrees = partial(assert_precision_agrees, backend="native")


@needs_compiler
@pytest.mark.parametrize("case", PAIRWISE + WITH_HISTORY + WIDE, ids=str)
def test_attention_agrees_with_the_reference(case):
    assert_native_agrees(case)


@needs_compiler
def test_attention_takes_any_strides():
    tensors = make(Case(length=65, dtype=torch.float32))
    turned = tensors.map(lambda x: x.transpose(1, 3).contiguous().transpose(1, 3) if x.dim() == 4 else x)
    assert turned.query.stride(3) != 1
    case = Case(length=65)
    assert torch.equal(run(case, turned, backend="native").output, run(case, tensors, backend="native").output)


@needs_compiler
def test_weights_beyond_the_diagonal_do_no_harm_where_they_overflow():
    case = Case(length=40, dtype=torch.float32, local_chunk=40)
    tensors = make(case)
    tensors.local_key[:, :, 20:] *= 1e20
    clean = make(case)
    found, expected = (run(case, x, backend="native").output[:, :, :20] for x in (tensors, clean))
    assert torch.equal(found, expected)


@needs_compiler
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_threads_gives_the_same_bits(causal):
    case = Case(length=100, heads=6, key_heads=3, causal=causal, dtype=torch.float32)
    threads = torch.get_num_threads()
    sketch, x = LearnedSketch(12, sketch_size=8), torch.randn(2, 4, 100, 12, requires_grad=True)
    found = []
    for count in (1, 3, 3):
        torch.set_num_threads(count)
        features = sketch.map_queries(x)
        found.append([*gradients(case, make(case), "native").values(), features])
        found[-1].append(torch.autograd.grad(features.square().sum(), x)[0])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


@needs_compiler
def test_packed_documents_attend_in_both_directions_as_they_do_apart():
    case = Case(causal=False, local_chunk=16, batch=1, dtype=torch.float32)
    tensors = make(case, 104)
    offsets = [0, 5, 55, 71, 104]
    found = run(case, tensors, backend="native", cu_seqlens=torch.tensor(offsets, dtype=torch.int32)).output
    apart = [run(case, tensors.span(*edges), backend="native").output for edges in pairwise(offsets)]
    assert relative_error(found, torch.cat(apart, 2)) < 1e-6


@needs_compiler
def test_what_is_far_keeps_its_digits_beside_a_chunk_that_weighs_a_million_times_as_much():
    """The sums of all but one chunk are added up: a subtraction would leave nothing of the far tokens."""
    case = Case(causal=False, local_chunk=16, length=80, batch=1, dtype=torch.float32, normalize=False, offset=0.0)
    tensors = make(case)
    tensors.key[:, :, 32:48] *= 1e3
    tensors.local_query.zero_()
    exact = tensors.map(torch.Tensor.double)
    found, expected = (
        run(case, x, backend=name).output[:, :, 32:48] for x, name in ((tensors, "native"), (exact, "reference"))
    )
    assert relative_error(found, expected) < 1e-5


@needs_compiler
@pytest.mark.parametrize(
    ("degree", "share", "shape", "sketch_size"),
    [
        (4, "layer", (2, 4, 50, 64), 32),
        (4, "head", (2, 4, 33, 24), 10),
        (8, "layer", (1, 2, 7, 20), 5),
        (16, "head", (1, 4, 20, 16), 12),
        (4, "layer", (1, 1, 1, 70), 3),
    ],
)
def test_learned_sketch_agrees_with_the_formula_in_float64(degree, share, shape, sketch_size):
    torch.manual_seed(0)
    sketch = LearnedSketch(
        shape[3], degree=degree, sketch_size=sketch_size, num_kv_heads=2 if shape[1] > 1 else 1, share=share
    )
    weights = [weight.detach() + 0.1 * torch.randn_like(weight) for one in sketch.networks for weight in one.weights()]
    x, cotangent = torch.randn(shape), torch.randn(*shape[:3], sketch_size)
    found, expected = (
        sketch_and_gradients(x.to(dtype), [weight.to(dtype) for weight in weights], degree // 2, cotangent, backend)
        for dtype, backend in ((torch.float32, "native"), (torch.float64, "chunked"))
    )
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 5e-5 * degree / 4


def sketch_and_gradients(x, weights, leaves, cotangent, backend, depth=2, activation="gelu"):
    """Features and the gradients of x and all weights."""
    leaf_tensors = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    options = {"depth": depth, "activation": activation, "backend": backend}
    features = learned_sketch(leaf_tensors[0], leaf_tensors[1:], leaves, **options)
    return [features.detach(), *torch.autograd.grad((features * cotangent).sum(), leaf_tensors)]


@needs_compiler
def test_small_features_keep_their_relative_precision():
    """tanh near zero: 1 - 2 / (e^2x + 1) would lose it."""
    torch.manual_seed(0)
    sketch, x = LearnedSketch(16, sketch_size=8), torch.randn(1, 1, 64, 16)
    weights = [w.detach() for one in sketch.networks for w in one.weights()]
    for down in (weights[7], weights[15]):
        down *= 1e-3
    found = learned_sketch(x, weights, 2, backend="native")
    expected = learned_sketch(x.double(), [w.double() for w in weights], 2, backend="chunked")
    assert found.abs().max() < 1e-4
    assert relative_error(found, expected) < 1e-5


FORWARD, SHARED, BACKWARD = "linear_attention.cpp", "linear_attention.h", "linear_attention_backward.cpp"
MUTANTS = {
    "prefix zeroed": (FORWARD, "if (sums_.empty()) {", "if (true) {"),
    "first chunk never folded": (SHARED, "if (!chunk.folded) return;", "if (chunk.start == 0) return;"),
    "denominator dropped": (FORWARD, "mass = mass_[t] +", "mass = 0 * mass_[t] +"),
    "inside counted twice": (FORWARD, "store(row + v * kLanes, weight);", "store(row + v * kLanes, weight + weight);"),
    "pairs counted once": (FORWARD, "sums_.read(query_, 2.0f,", "sums_.read(query_, 1.0f,"),
    "no causal mask": (SHARED, "return call.diagonal == kCausal ? key :", "return call.diagonal == kCausal ? 0 :"),
    "gradient of the sums dropped": (BACKWARD, "folder_.fold(count", "if (false) folder_.fold(count"),
    "keys overwritten": (
        BACKWARD,
        "{keys_gradient_ + f * chunk_.part + key * row, row}, true)",
        "{keys_gradient_ + f * chunk_.part + key * row, row}, false)",
    ),
    "second factor dropped": (FORWARD, "if (head_.factors == 2) weight *=", "if (false) weight *="),
    "gradients of factors exchanged": (BACKWARD, "change * slope * other);", "change * slope * score);"),
    "factors not told apart": (SHARED, "{rows.data + factor * inner_width,", "{rows.data + 0 * inner_width,"),
    "later chunks of blocks dropped": (FORWARD, "add_later(shared, start", "if (false) add_later(shared, start"),
    "blocks never end": (SHARED, "return start / call.chunk % chunks_of_block", "return start"),
    "keys of earlier chunks of blocks dropped": (
        BACKWARD,
        "empty()) keys_of_chunk(true",
        "empty() && false) keys_of_chunk(true",
    ),
    "queries of later chunks of blocks overwritten": (BACKWARD, "count, true);", "count, false);"),
    "decay forgotten between chunks": (SHARED, "sums.scale(chunk.decay.carried());", "sums.scale(1.0f);"),
    "rows of queries see a tile too few": (SHARED, "visible(first + kTileRows, size)", "visible(first, size)"),
    "rows of keys see a panel too few": (BACKWARD, "visible(first + kPanel, chunk_", "visible(first, chunk_"),
    "rows of keys seen from too late": (BACKWARD, "head_.seen_from(key) - first,", "head_.seen_from(key) + 1 - first,"),
    "rows of the wrong tokens": (FORWARD, "read_rows(from, count,", "read_rows({from.at(1), from.token}, count - 1,"),
    "rows inside a chunk dropped": (BACKWARD, "turn(changes_, kBlock, visible,", "turn(changes_, kBlock, 0,"),
    "rows of other queries folded": (BACKWARD, "std::min(kFoldTokens, count - first),", "kBlock,"),
    "queries in place beside theirs": (FORWARD, "query_ = from.data;", "query_ = from.data + 1;"),
    "keys in place beside theirs": (SHARED, "x_ = from.data;", "x_ = from.data + 1;"),
    "queries of a chunk in place beside theirs": (BACKWARD, "? from.data : copy_", "? from.data + 1 : copy_"),
    "values in place beside theirs": (SHARED, "values = of_values.data;", "values = of_values.data + 1;"),
    "rows of a mass forgotten": ("sums.h", "t < kBlock && mass;", "t < 0 && mass;"),
    "rows of the gradient of a mass forgotten": ("sums.h", "{normalizer_ + first, 1,", "{normalizer_ + first, 0,"),
}


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    case = Case(length=300, local_chunk=0, decays=True) if "decay" in name else Case(length=100)
    case = Case(length=100, power=1, factors=2, local_chunk=0) if "factor" in name else case
    case = Case(block_size=32, length=100) if "blocks" in name else case
    case = Case(length=100, power=1, local_chunk=0) if "rows" in name else case
    in_place = Case(length=96, power=1, local_chunk=0, features=32, value_dim=64, key_heads=4)
    case = in_place if "in place" in name else case
    assert_native_agrees(case)
    broken = with_mutant(*MUTANTS[name], tmp_path)
    monkeypatch.setattr(native_attention, "library", lambda: broken)
    with pytest.raises(AssertionError, match="relative errors beyond"):
        assert_native_agrees(case)


SKETCH, SKETCH_SHARED, SKETCH_BACKWARD = "learned_sketch.cpp", "learned_sketch.h", "learned_sketch_backward.cpp"
SKETCH_MUTANTS = {
    "a stage forgotten": (SKETCH, "which < call_.depth", "which < call_.depth - 1"),
    "relu lets all through": (SKETCH_SHARED, "return x < 0.0f ? splat(0.0f) : x;", "return x;"),
    "relu climbs too slowly": (SKETCH_SHARED, "x > 0.0f ? splat(1.0f)", "x > 0.0f ? splat(0.9f)"),
    "the slope of silu is its gate": (SKETCH_SHARED, "gate + x * gate * (1.0f - gate); }", "gate; }"),
    "silu for gelu": (SKETCH_SHARED, "kCubic = 0.0713548162726f", "kCubic = 0.0f"),
    "weights of another stage": (SKETCH_SHARED, "* call_.depth + which)", "* call_.depth + which % 2)"),
    "gradients of a stage forgotten": (SKETCH_BACKWARD, "which > 0; which--", "which > 1; which--"),
    "gradients of the last stage everywhere": (SKETCH_BACKWARD, "which--, gradient = middle_)", "which--)"),
}


def assert_native_networks_agree() -> None:
    """Every activation, in networks of three stages."""
    torch.manual_seed(0)
    weights = [
        weight.detach() for one in LearnedSketch(12, sketch_size=6, depth=3).networks for weight in one.weights()
    ]
    x, cotangent = torch.randn(2, 2, 40, 12), torch.randn(2, 2, 40, 6)
    for activation in ("gelu", "relu", "silu"):
        found, expected = (
            sketch_and_gradients(
                x.to(dtype), [weight.to(dtype) for weight in weights], 2, cotangent, backend, 3, activation
            )
            for dtype, backend in ((torch.float32, "native"), (torch.float64, "chunked"))
        )
        worst = max(relative_error(a, b) for a, b in zip(found, expected, strict=True))
        assert worst < 5e-5, f"relative errors beyond rounding: {activation} {worst}"


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("name", SKETCH_MUTANTS)
def test_a_broken_network_is_caught(name, monkeypatch, tmp_path):
    assert_native_networks_agree()
    broken = with_mutant(*SKETCH_MUTANTS[name], tmp_path)
    monkeypatch.setattr(native_sketch, "library", lambda: broken)
    with pytest.raises(AssertionError, match="relative errors beyond"):
        assert_native_networks_agree()


def with_mutant(file: str, old: str, new: str, folder: Path) -> ctypes.CDLL:
    """The programs with one place of a file changed."""
    shutil.copytree(SOURCE, folder / "source")
    text = (folder / "source" / file).read_text()
    assert text.count(old) == 1
    (folder / "source" / file).write_text(text.replace(old, new))
    return ctypes.CDLL(str(build.compiled(folder / "source", folder)))


def compilers() -> list[str]:
    """Those of the usual compilers that are here."""
    return [name for name in ("g++", "clang++") if shutil.which(name)]


@pytest.mark.full
@pytest.mark.parametrize("compiler", compilers())
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_every_compiler_and_width_of_vectors_gives_the_same_result(compiler, capability, monkeypatch, tmp_path):
    levels = ["DEFAULT", "AVX2", "AVX512"]
    here = torch.backends.cpu.get_cpu_capability()
    if here not in levels or levels.index(capability) > levels.index(here):
        pytest.skip(f"this machine has {here}")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    made = ctypes.CDLL(str(build.compiled(SOURCE, tmp_path)))
    for module in (native_attention, native_sketch, native_window, native_polynomial, one_token):
        monkeypatch.setattr(module, "library", lambda: made)
    for case in (*PAIRWISE, *WIDE):
        assert_native_agrees(case)
    assert_all_agree(WINDOWS)
    for case in POLYNOMIALS:
        assert_polynomial_agrees(case)
    for options in ONE_TOKEN.values():
        assert_one_token_is_exact(options)
    test_learned_sketch_agrees_with_the_formula_in_float64(8, "head", (2, 4, 33, 24), 10)


def test_what_the_programs_cannot_take_is_refused_when_asked_for_and_avoided_by_auto():
    case = Case(length=8)
    with pytest.raises(RuntimeError, match=r"takes float32, bfloat16 and float16, got torch\.float64"):
        run(case, make(case), backend="native")
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"and float16, got torch\.float64"):
        learned_sketch_backend(x, "native")
    assert learned_sketch_backend(x) == "chunked"
    assert ops.linear_attention_backend(x, x) in ("reference", "chunked")
    with pytest.raises(ValueError, match=r"unknown backend 'fast'"):
        learned_sketch_backend(x, "fast")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine without a compiler: nothing on the path, nothing kept from before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_found", [])
    library.cache_clear()
    yield
    library.cache_clear()


def test_without_a_compiler_auto_takes_another_backend_and_asking_says_why(no_compiler):
    tensors = make(Case(length=100, dtype=torch.float32))
    assert ops.linear_attention_backend(tensors.query, tensors.key) in ("reference", "chunked")
    assert (
        relative_error(run(Case(), tensors, backend="auto").output, run(Case(), tensors, backend="reference").output)
        < 1e-5
    )
    with pytest.raises(RuntimeError, match=r"cannot run here: no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+"):
        run(Case(), tensors, backend="native")
    with pytest.raises(RuntimeError, match="no C"):
        library()


@pytest.fixture
def broken_compiler(no_compiler, monkeypatch, tmp_path):
    """A machine whose compiler refuses everything."""
    compiler = tmp_path / "refusing"
    compiler.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def test_a_compiler_that_fails_is_said_once_and_auto_takes_another_backend(broken_compiler):
    x = torch.randn(1, 1, 4, 8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [ops.linear_attention_backend(x, x) for _ in range(2)] == ["reference"] * 2
    assert len(said) == 1
    assert "failed: error: out of order; plain PyTorch, which is slower" in str(said[0].message)


@needs_compiler
def test_a_program_that_does_not_compile_is_reported_with_the_compilers_words(tmp_path):
    (tmp_path / "wrong.cpp").write_text("int main() { return nothing; }")
    with pytest.raises(RuntimeError, match=r"failed: .*wrong\.cpp.*error.*nothing"):
        build.compiled(tmp_path, tmp_path)
    assert not list(tmp_path.glob("*.so"))


@needs_compiler
def test_programs_are_compiled_once_and_again_when_the_source_changes(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.cpp").write_text('extern "C" int one() { return 1; }')
    first = build.compiled(source, tmp_path)
    monkeypatch.setattr(build, "compile_programs", lambda *arguments: pytest.fail("compiled again"))
    assert build.compiled(source, tmp_path) == first
    assert ctypes.CDLL(str(first)).one() == 1
    monkeypatch.undo()
    (source / "one.cpp").write_text('extern "C" int one() { return 2; }')
    assert ctypes.CDLL(str(build.compiled(source, tmp_path))).one() == 2


ONE = 'extern "C" int one() { return 1; }'


@pytest.fixture
def one(tmp_path) -> tuple[Path, Path]:
    """The source of a program, and what was compiled of it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.cpp").write_text(ONE)
    (tmp_path / "kept").mkdir(mode=0o700)
    return tmp_path / "source", build.compiled(tmp_path / "source", tmp_path / "kept")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def let_others_write(path: Path) -> None:
    path.chmod(0o722)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@needs_compiler
@pytest.mark.parametrize("spoil", [cut_short, one_bit, let_others_write, link], ids=lambda spoil: spoil.__name__)
def test_a_kept_library_that_is_damaged_or_could_be_another_users_is_not_loaded(one, spoil):
    """One that is cut short ends the process by a signal; one that others wrote runs as this user."""
    source, first = one
    spoil(first)
    assert find_trusted(first.parent, first.stem.rpartition("-")[0]) is None
    again = build.compiled(source, first.parent)
    assert find_trusted(first.parent, first.stem.rpartition("-")[0]) == again
    assert ctypes.CDLL(str(again)).one() == 1


@needs_compiler
def test_what_is_compiled_is_the_users_alone_whatever_the_mask(tmp_path):
    (tmp_path / "one.cpp").write_text(ONE)
    before = os.umask(0)
    try:
        made = build.compiled(tmp_path, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_cache_below_a_folder_of_all_is_not_used(monkeypatch, tmp_path, mode):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    build._temporary_folder.cache_clear()
    with pytest.warns(UserWarning, match="shared can be written by all"):
        folder = build._folder()
    assert tmp_path not in folder.parents
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    build._temporary_folder.cache_clear()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give folders away")
def test_a_cache_that_another_user_made_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "polysketch" / "native").mkdir(parents=True)
    os.chown(tmp_path / "polysketch" / "native", 12345, 12345)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._temporary_folder.cache_clear()
    with pytest.warns(UserWarning, match="belongs to user 12345"):
        folder = build._folder()
    assert tmp_path not in folder.parents
    build._temporary_folder.cache_clear()


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(monkeypatch, tmp_path):
    (tmp_path / "polysketch").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._temporary_folder.cache_clear()
    with pytest.warns(UserWarning, match="compiled for this process alone"):
        folder = build._folder()
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    assert build._folder() == folder  # not another one, in which all would be compiled again
    folder.rmdir()
    build._temporary_folder.cache_clear()


STRUCTURES = {
    "linear_attention.h": ("LinearAttentionCall", native_attention._AttentionCall),
    "learned_sketch.h": ("LearnedSketchCall", native_sketch._Call),
    "low_rank_sketch.h": ("LowRankSketchCall", native_low_rank._Call),
    "random_features.h": ("RandomFeaturesCall", native_random._Call),
    "polynomial_attention.h": ("PolynomialAttentionCall", native_polynomial._Call),
    "window_attention.h": ("WindowAttentionCall", native_window._Call),
    "tile_attention.h": ("TileAttentionCall", native_hyper._Call),
    "delta_rule.h": ("DeltaRuleCall", native_delta._Call),
    "linear_attention_extend.h": ("ExtendCall", native_attention._ExtendCall),
    "polysketch_one.h": ("PolysketchOneCall", one_token._Call),
}


@needs_compiler
def test_structures_are_those_of_the_programs(tmp_path):
    """A field added on one side only would shift all that follow."""
    for number, (header, (structure, _)) in enumerate(STRUCTURES.items()):
        (tmp_path / f"{number}.cpp").write_text(
            f'#include "{SOURCE}/{header}"\n extern "C" long size_{number}() {{ return sizeof({structure}); }}\n'
        )
    sizes = ctypes.CDLL(str(build.compiled(tmp_path, tmp_path)))
    found = [getattr(sizes, f"size_{number}")() for number in range(len(STRUCTURES))]
    assert found == [ctypes.sizeof(mirror) for _, mirror in STRUCTURES.values()]


@needs_compiler
def test_of_several_files_the_one_that_does_not_compile_is_told_and_nothing_stays(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "kept"
    source.mkdir()
    folder.mkdir(mode=0o700)
    for number in range(9):
        (source / f"{number}.cpp").write_text(f'extern "C" int f{number}() {{ return {number}; }}')
    (source / "5.cpp").write_text("int main() { return nothing; }")
    with pytest.raises(RuntimeError, match=r"failed: .*5\.cpp.*error.*nothing"):
        build.compiled(source, folder)
    assert not list(folder.iterdir())
    (source / "5.cpp").write_text('extern "C" int f5() { return 5; }')
    programs = ctypes.CDLL(str(build.compiled(source, folder)))
    assert [getattr(programs, f"f{number}")() for number in range(9)] == list(range(9))
    assert len(list(folder.iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_decoding_takes_a_decay_of_another_dtype(dtype):
    case = Case(local_chunk=8, length=21, decays=True, dtype=torch.float32)
    tensors = make(case)
    tensors.log_decay = tensors.log_decay.to(dtype)
    expected = run(case, tensors, backend="reference").output
    state = empty_state(case)
    steps = [
        ops.linear_attention_extend_(
            *(x.contiguous() for x in (one.query, one.key, one.value)), state, **arguments(case, one)
        ).output
        for one in (tensors.span(i, i + 1) for i in range(case.length))
    ]
    assert relative_error(torch.cat(steps, 2), expected) < 1e-5


@needs_compiler
@pytest.mark.parametrize("backend", ["chunked", "native"])
@pytest.mark.parametrize("transposed", first_always([True, False]))
def test_the_sketch_is_an_operator_whose_fakes_say_where_numbers_lie(backend, transposed):
    """Compiled code trusts the fake's strides."""
    sketch = LearnedSketch(6, degree=4, sketch_size=4, num_kv_heads=2)
    weights = [weight.detach() for network in sketch.networks for weight in network.weights()]
    x = torch.randn(1, 5, 2, 6).transpose(1, 2) if transposed else torch.randn(1, 2, 5, 6)
    torch.library.opcheck(torch.ops.polysketch.learned_sketch.default, ([x], weights, 2, 2, "relu", backend))
    backward = torch.ops.polysketch.learned_sketch_backward.default
    torch.library.opcheck(backward, ([torch.randn(1, 2, 5, 4)], [x], weights, 2, 2, "silu", backend))
