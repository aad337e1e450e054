"""Programs that a wheel brings are used where they fit and are trusted as the code beside them, and only there."""

import ctypes
import os
import platform
from pathlib import Path

import pytest
import torch

from ops.test_native import cut_short, needs_compiler, one_bit
from polysketch.ops.native import build, compiler, shipped

SETS = compiler._SETS.get(platform.machine(), ())

needs_wheel = pytest.mark.skipif(not SETS, reason=f"wheels bring nothing for {platform.machine()}")


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The folder of an installed package: code, source and the programs that came with it."""
    folder = tmp_path / "native"
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "one.cpp").write_text('extern "C" int one() { return 1; }')
    (folder / "shipped.py").write_text("")
    for path in compiler.compile_for_wheel(folder / "source", folder):
        path.chmod(0o644)
    monkeypatch.setattr(shipped, "_CODE", folder / "shipped.py")
    monkeypatch.setattr(shipped, "_PROCESSOR", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl\n")
    return folder


def found(package: Path, instructions: str = "DEFAULT") -> Path | None:
    return shipped.find_shipped(package / "source", instructions)


@needs_compiler
@needs_wheel
def test_a_wheel_has_one_file_for_each_set_of_instructions_and_each_is_found(package):
    files = {name: found(package, name) for name in SETS}
    assert all(f"programs-{name.lower()}-" in str(path) for name, path in files.items())
    assert found(package, "NO AVX") == files["DEFAULT"]  # PyTorch's word on processors that have least
    assert ctypes.CDLL(str(files["DEFAULT"])).one() == 1


@needs_compiler
@needs_wheel
@pytest.mark.parametrize("instructions", [*SETS, "NO AVX"])
def test_one_set_alone_is_the_file_that_a_wheel_has_of_it(package, tmp_path, instructions):
    (alone,) = compiler.compile_for_wheel(package / "source", tmp_path, instructions)
    assert alone.name == found(package, instructions).name


@needs_compiler
@needs_wheel
@pytest.mark.skipif("AVX512" not in SETS, reason="this kind of processor has one set alone")
def test_no_file_is_loaded_whose_instructions_the_processor_does_not_list(package, monkeypatch):
    """PyTorch is told what to use by ATEN_CPU_CAPABILITY, whatever there is."""
    shipped._PROCESSOR.write_text("flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512dq\n")  # no avx512vl
    assert found(package, "AVX512") is None
    assert found(package, "AVX2") is not None
    shipped._PROCESSOR.write_text("flags\t\t: fpu avx2\n")  # no fma
    assert found(package, "AVX2") is None
    monkeypatch.setattr(shipped, "_PROCESSOR", package / "not there")
    assert found(package, "AVX2") is None
    assert found(package, "DEFAULT") is not None


def change_the_source(package: Path, path: Path) -> None:
    (package / "source" / "one.cpp").write_text('extern "C" int one() { return 2; }')


def let_others_write(package: Path, path: Path) -> None:
    path.chmod(0o666)


def link(package: Path, path: Path) -> None:
    path.rename(package / "elsewhere")
    path.symlink_to(package / "elsewhere")


def no_library(package: Path, path: Path) -> None:
    """Whole by its name, but nothing that loads: as where the C library is older than it needs."""
    stem = path.stem.rpartition("-")[0]
    path.unlink()
    (package / compiler.named_by_content(stem, b"not a library")).write_bytes(b"not a library")


SPOILERS = [
    *(change_the_source, let_others_write, link, no_library),
    *(lambda package, path: cut_short(path), lambda package, path: one_bit(path)),
]


@needs_compiler
@needs_wheel
@pytest.mark.parametrize("spoil", SPOILERS)
def test_what_does_not_fit_or_may_be_anothers_is_as_if_it_were_not_there(package, spoil):
    path = found(package)
    assert path is not None
    spoil(package, path)
    assert found(package) is None


@needs_compiler
@needs_wheel
def test_a_file_is_trusted_as_far_as_the_code_beside_it(package):
    """A user whose mask lets the group write installs both so; who writes the one can write the other."""
    path = found(package)
    path.chmod(0o664)
    assert found(package) is None
    shipped._CODE.chmod(0o664)
    assert found(package) == path


@needs_compiler
@needs_wheel
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_file_belongs_to_the_user_or_to_whom_the_code_belongs(package):
    path = found(package)
    os.chown(path, 12345, 12345)
    assert found(package) is None
    os.chown(shipped._CODE, 12345, 12345)
    assert found(package) == path
    path.chmod(0o664)
    shipped._CODE.chmod(0o664)
    os.chown(path, 12345, 54321)  # its group may write, and is not the code's
    assert found(package) is None


@needs_compiler
@needs_wheel
def test_a_kind_of_processor_that_wheels_do_not_know_is_refused_in_one_line(package, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(RuntimeError, match="wheels bring programs for x86_64, aarch64; this machine is riscv64"):
        compiler.compile_for_wheel(package / "source", package)
    assert found(package) is None


@needs_compiler
@needs_wheel
def test_programs_of_the_wheel_come_before_a_compiler(package, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_SOURCE", package / "source")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._file() == found(package)
    change_the_source(package, package)
    assert build._file().parent == tmp_path / "polysketch" / "native"
