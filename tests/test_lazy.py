"""What is loaded when: names are there from the start, the modules behind them when they are first asked for."""

import pkgutil
import subprocess
import sys

import pytest

from polysketch import benchmarking, conversion, data, training
from polysketch.cli import VERBS
from polysketch.cli.benchmark import BENCHMARKS

HEAVY = {"torch", "numpy", "transformers", "triton"}


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter holds after running `code`."""
    report = f"import sys; print(*({HEAVY!r} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.splitlines()[-1].split())


def command(*arguments: str) -> str:
    """Code that runs a command line whose exit status is 0."""
    return f"from polysketch.cli import main\nassert main({arguments!r}) == 0"


def test_help_loads_neither_torch_nor_numpy():
    assert loaded_by(command("--help")) == set()


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_of_a_verb_loads_neither_torch_nor_numpy(verb):
    """Flags are fields of dataclasses, which stand apart from what computes."""
    assert loaded_by(command(verb, "--help")) == set()


@pytest.mark.parametrize("benchmark", sorted(BENCHMARKS))
def test_help_of_a_benchmark_loads_neither_torch_nor_numpy(benchmark):
    assert loaded_by(command("benchmark", benchmark, "--help")) == set()


def test_text_is_prepared_without_torch(tmp_path):
    (tmp_path / "text.txt").write_text("words and words\n" * 50)
    arguments = ("prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"), "--validation-share", "0")
    assert loaded_by(command(*arguments, "--test-share", "0")) == {"numpy"}


@pytest.mark.parametrize("missing", ["data", "model"])
def test_a_conversion_says_what_is_missing_before_transformers_is_loaded(missing, tmp_path):
    """It takes several times as long as all else."""
    (tmp_path / "text.txt").write_text("".join(f"word {number} and more words\n" for number in range(500)))
    shares = ("--validation-share", "0.3", "--test-share", "0", "--cut-text", "500")
    prepare = ("prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"), *shares)
    there = {"data": str(tmp_path / "data"), "model": str(tmp_path)} | {missing: str(tmp_path / "none")}
    (tmp_path / "config.json").write_text("{}")
    options = ("--attention", "polysketch", "--data", there["data"], "--context", "64", "--out", str(tmp_path / "out"))
    convert = ("convert", there["model"], *options)
    code = f"{command(*prepare)}\nassert main({convert!r}) == 1"
    assert "transformers" not in loaded_by(code)


def test_importing_the_library_alone_loads_nothing():
    assert loaded_by("import polysketch; dir(polysketch)") == set()
    assert loaded_by("from polysketch.training import TrainingConfig") == set()
    assert loaded_by("from polysketch.conversion import ConversionConfig") == set()


NAMES = """
import polysketch
polysketch.ops.linear_attention, polysketch.models.TransformerLM
from polysketch import attention, models, ops
from polysketch.training import *
train, TrainingConfig, RunDescription
from polysketch.data import *
TrainingWindows, PreparedData
"""

OTHER_NAMES = """
import polysketch.conversion, polysketch.data, polysketch.training
for package in (polysketch, polysketch.conversion, polysketch.data, polysketch.training):
    try:
        package.nothing
    except AttributeError as error:
        assert f"module {package.__name__!r} has no attribute 'nothing'" == str(error)
    else:
        raise AssertionError(package)
"""


def test_the_compiler_is_loaded_by_those_who_compile():
    """It takes as long as all of torch besides."""
    code = "import sys, polysketch.ops, polysketch.training.trainer; assert 'torch._dynamo' not in sys.modules"
    assert "torch" in loaded_by(code)


def test_every_way_of_asking_for_a_name_finds_it():
    assert "torch" in loaded_by(NAMES)


@pytest.mark.parametrize("package", [benchmarking, conversion, data, training])
def test_no_name_is_hidden_by_a_module_of_the_same_name(package):
    """An imported module is an attribute of its package, which would then not be asked for the name."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)


def test_other_names_are_missing_as_in_any_module():
    assert loaded_by(OTHER_NAMES) <= {"numpy"}
