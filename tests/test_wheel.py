"""An installed wheel computes by the programs that it brings, without a compiler; built, installed and run here."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
print(next(WheelBuilder(".").build(directory=sys.argv[1])))
"""
USE = """
import json, torch
from polysketch import ops
from polysketch.ops.native import build

torch.manual_seed(0)
query, key = torch.rand(2, 1, 2, 100, 8)
value = torch.randn(1, 2, 100, 8)
options = {"power": 2, "causal": True, "offset": 1.0}
chosen = ops.linear_attention_backend(query, key)
if chosen == "native":
    ways = [ops.linear_attention(query, key, value, backend=name, **options).output for name in ("native", "reference")]
    error = ((ways[0] - ways[1]).norm() / ways[1].norm()).item()
    print(json.dumps({"chosen": chosen, "file": str(build._file()), "error": error}))
else:
    print(json.dumps({"chosen": chosen, "why": build.why_unavailable()}))
"""

pytest.importorskip("hatchling")


def build_wheel(folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.splitlines()[-1])


def test_another_build_brings_no_programs_and_fits_every_platform(tmp_path):
    wheel = build_wheel(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert "polysketch/ops/native/source/linear_attention.cpp" in names


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An environment with the wheel, and with the packages of this one; the folder of the native programs in it."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder, HATCH_BUILD_HOOK_ENABLE_CUSTOM="true")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True, env=without_ours())
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    return site / "polysketch" / "ops" / "native"


def without_ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def use(native: Path, cache: Path, **environment: str) -> dict:
    """What a process of that environment says, that has no compiler and nothing kept."""
    python = native.parents[5] / "bin" / "python"
    changed = {"CXX": "/bin/false", "XDG_CACHE_HOME": str(cache), **environment}
    command = [python, "-W", "ignore", "-c", USE]
    done = subprocess.run(
        command, cwd=cache, env={**without_ours(), **changed}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.full
def test_the_wheel_says_its_platform_and_has_a_file_for_each_set_of_instructions(installed):
    (wheel,) = installed.parents[6].glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert sorted(path.name.split("-")[1] for path in installed.glob("*.so")) in (
        ["avx2", "avx512", "default"],
        ["default"],
    )


@pytest.mark.full
@pytest.mark.parametrize("instructions", ["default", "avx2", "avx512"])
def test_an_installed_wheel_needs_no_compiler(installed, instructions, tmp_path):
    levels = ["DEFAULT", "AVX2", "AVX512"]
    here = torch.backends.cpu.get_cpu_capability()
    if instructions != "default" and (here not in levels or levels.index(here) < levels.index(instructions.upper())):
        pytest.skip(f"this machine has {here}")
    said = use(installed, tmp_path, ATEN_CPU_CAPABILITY=instructions)
    assert said["chosen"] == "native"
    assert Path(said["file"]).parent == installed
    assert f"programs-{instructions}-" in said["file"]
    assert said["error"] < 1e-6
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.full
def test_a_file_that_was_changed_is_not_loaded(installed, tmp_path):
    for path in installed.glob("*.so"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    said = use(installed, tmp_path)
    assert said["chosen"] == "reference"
    assert "/bin/false failed" in said["why"]
