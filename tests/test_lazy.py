"""What is loaded when: names are there from the start, the modules behind them when they are first asked for."""

import json
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


WRONG_PLACES = [
    ("prepare absent.txt --out new", "expected a file or folder to read, found nothing at absent.txt"),
    ("train --data absent --out new", "expected a prepared folder, found nothing at absent: run polysketch prepare"),
    ("train --data full --out new", "expected description.json in full, found none"),
    ("train --data data --out new --context 99999", "--context 99999: expected at least 100000 training tokens"),
    ("train --data data --out full --context 64", "full: expected an empty folder or a run folder, found 'thesis.txt'"),
    ("train --data data --out run --context 64", "run already holds a run: give --resume to go on with it"),
    ("train --data data --out run --context 64 --resume --checkpoint step-1", "no checkpoint 'step-1' in run"),
    ("train --data data --out new --context 64 --init-from absent", "absent/config.json is missing: expected a run"),
    ("evaluate absent", "absent/config.json is missing: expected a run folder made by `polysketch train`"),
    ("evaluate run --checkpoint step-1", "no checkpoint 'step-1' in run/checkpoints: found step-00000007"),
    ("evaluate run --data absent", "expected a prepared folder, found nothing at absent"),
    ("evaluate run --out absent/figures.json", "expected a folder absent for --out, found none"),
    ("generate absent --prompt x", "absent/config.json is missing: expected a run folder made by `polysketch train`"),
    ("generate run --checkpoint step-1", "no checkpoint 'step-1' in run/checkpoints: found step-00000007"),
    ("export absent new", "absent/config.json is missing: expected a run folder made by `polysketch train`"),
    ("export run new --checkpoint step-1", "no checkpoint 'step-1' in run/checkpoints: found step-00000007"),
    ("export run full", "expected a new or empty folder for --out, found full with contents"),
    ("import absent new", "expected a folder that `polysketch export` wrote, found no config.json in absent"),
    ("import run new", "run is the folder of a run already: evaluate or generate from it, or export it"),
    ("import model new", "expected a model of type polysketch in model, found 'gpt2'"),
    ("import model full", "expected a new or empty folder for --out, found full with contents"),
    ("convert model --data absent --out new", "expected a prepared folder, found nothing at absent"),
    ("convert absent --data data --out new --context 64", "found no absent/config.json"),
    ("convert model --data data --out full --context 64", "full: expected an empty folder or a run folder"),
    ("convert model --data data --out new --context 99999", "at least 100000 tokens in the train split of data"),
    ("benchmark attention --out absent/record.json", "expected a folder absent for --out, found none"),
    ("benchmark attention --plot absent/plot.png", "expected a folder absent for --plot, found none"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with prepared data, a run without weights, a model of transformers without any, and foreign files."""
    there = tmp_path_factory.mktemp("places")
    for split in ("train", "validation"):
        (there / "text" / split).mkdir(parents=True)
        (there / "text" / split / "text.txt").write_text("words and more words\n" * 10)
    data.prepare([there / "text"], "bytes", there / "data", progress=False)
    (there / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    entries = {"training": {"context": 64, "extend": False}, "resolved": {"dtype": "float32"}, "model": {}}
    source = {"folder": str(there / "data"), "description_sha256": ""}
    (there / "run" / "config.json").write_text(json.dumps(entries | {"data": source, "environment": {}}))
    (there / "model").mkdir()
    (there / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (there / "full").mkdir()
    (there / "full" / "thesis.txt").touch()
    return there


@pytest.mark.parametrize(("line", "message"), WRONG_PLACES)
def test_a_wrong_place_is_told_before_torch_or_transformers_is_loaded(line, message, places):
    """They take a second, and several: as long as the message would wait."""
    before = sorted(places.rglob("*"))
    code = f"""
import contextlib, io, os
from polysketch.cli import main
os.chdir({str(places)!r})
with contextlib.redirect_stderr(io.StringIO()) as error:
    assert main({line.split()!r}) == 1
assert {message!r} in error.getvalue(), error.getvalue()
assert len(error.getvalue().splitlines()) == 1, error.getvalue()
"""
    assert loaded_by(code) <= {"numpy"}
    assert sorted(places.rglob("*")) == before


def test_every_command_with_a_place_is_given_a_wrong_one():
    assert {line.split()[0] for line, _ in WRONG_PLACES} == VERBS.keys()


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


@pytest.mark.parametrize("module", ["ops", "models", "generation", "training.trainer", "benchmarking.workbench"])
def test_what_computes_loads_torch_and_neither_triton_nor_the_compiler_nor_transformers(module):
    code = f"import sys, polysketch.{module}; assert 'torch._dynamo' not in sys.modules"
    assert loaded_by(code) == {"torch", "numpy"}


COUNTED = """
{imports}
import torch
query = torch.ones(1, 1, 8, 4)
with FlopCounterMode(display=False) as counter:
    ops.linear_attention(query, query, query, causal=True, backend="chunked")
assert torch.ops.polysketch.linear_attention in counter.get_flop_counts()["Global"], counter.get_flop_counts()
"""


@pytest.mark.parametrize("ours_first", [True, False])
def test_operations_are_counted_whichever_is_imported_first(ours_first):
    """The counter loads Triton: it gets our formulas when a program loads it."""
    imports = [
        "from polysketch import ops; ops.linear_attention",
        "from torch.utils.flop_counter import FlopCounterMode",
    ]
    code = COUNTED.format(imports="\n".join(imports if ours_first else reversed(imports)))
    loaded_by(code)
