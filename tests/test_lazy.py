"""What is loaded when: names are there from the start, the modules behind them when they are first asked for."""

import dataclasses
import json
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from polysketch import attention, benchmarking, conversion, data, models, nn, training
from polysketch.benchmarking import server_process
from polysketch.cli import VERBS, function_of
from polysketch.cli.benchmark import BENCHMARKS
from polysketch.lazy import TableOnDemand

HEAVY = {"torch", "numpy", "transformers", "triton"}


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter holds after running `code`."""
    report = f"import sys; print(*({HEAVY!r} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.splitlines()[-1].split())


FORKS = """
import json, os, sys, tempfile, traceback
{first}
codes, ended = json.load(sys.stdin), []
for code in codes:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            status = 1
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            try:
                exec(code, {{"__name__": "__main__"}})
                print(*({heavy!r} & sys.modules.keys()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        output.seek(0)
        ended.append((status, output.read()))
print(json.dumps(ended))
"""


TURNS = """
import contextlib, io, json, os, sys, traceback
{first}
ended = []
for code in json.load(sys.stdin):
    status, output = 0, io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(code, {{"__name__": "__main__"}})
        except BaseException:
            traceback.print_exc()
            status = 1
        print(*({heavy!r} & sys.modules.keys()))
    ended.append((status, output.getvalue()))
print(json.dumps(ended))
"""


def loaded_by_each(codes: Sequence[str], *, first: str, program: str = FORKS) -> Callable[[str], set[str]]:
    """`loaded_by` of many codes: each runs in a fork of one fresh interpreter, which has run `first`.

    With `TURNS`, they run one after the other in that interpreter itself: what one of them loads is there for those
    after it, so that all of them are told to load it.
    """
    program = program.format(first=first, heavy=HEAVY)
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, input=json.dumps(codes), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    ended = dict(zip(codes, json.loads(finished.stdout), strict=True))

    def loaded(code: str) -> set[str]:
        status, output = ended[code]
        assert status == 0, output
        return set(output.splitlines()[-1].split())

    return loaded


def command(*arguments: str) -> str:
    """Code that runs a command line whose exit status is 0."""
    return f"from polysketch.cli import main\nassert main({arguments!r}) == 0"


VERBS_LOADED = """
import tyro
from polysketch.cli import VERBS, function_of
for verb in VERBS:
    function_of(verb)
"""
"""What every command imports, before forks: once for all of them. It is light, or each of them would tell."""

HELPS = [
    ("--help",),
    *((verb, "--help") for verb in sorted(VERBS)),
    *(("benchmark", name, "--help") for name in sorted(BENCHMARKS)),
]


@pytest.fixture(scope="module")
def loaded_by_help():
    return loaded_by_each([command(*arguments) for arguments in HELPS], first=VERBS_LOADED)


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_loads_neither_torch_nor_numpy(arguments, loaded_by_help):
    """Flags are fields of dataclasses, which stand apart from what computes."""
    assert loaded_by_help(command(*arguments)) == set()


def test_studies_are_listed_without_torch():
    records = Path(__file__).parents[1] / "studies"
    assert loaded_by(command("study", "--list", "--results", str(records))) == set()


def test_text_is_prepared_without_torch(tmp_path):
    (tmp_path / "text.txt").write_text("words and words\n" * 50)
    arguments = ("prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"), "--validation-share", "0")
    assert loaded_by(command(*arguments, "--test-share", "0")) == {"numpy"}


WRONG_PLACES = [
    ("task induction --out full", "with contents"),
    ("compare absent", "expected a run folder"),
    ("verify absent", "expected a folder"),
    ("study nope", "expected a study of selective-copying"),
    ("study", "expected the name of a study"),
    ("task nope --out new", "expected a task of selective-copying"),
    ("prepare absent.txt --out new", "expected a file or folder to read, found nothing at absent.txt"),
    (
        "train --data absent --out new",
        "expected a prepared folder, found nothing at absent: run polysketch prepare, or polysketch task for a task",
    ),
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
    ("serve absent", "absent/config.json is missing: expected a run folder made by `polysketch train`"),
    ("serve run --checkpoint step-1", "no checkpoint 'step-1' in run/checkpoints: found step-00000007"),
    ("serve model", "expected a model of type polysketch in model, found 'gpt2'"),
    ("serve run --port 65536", "--port: expected a number from 0 to 65535, found 65536"),
    ("serve run --chat-template absent", "--chat-template: expected a file, found none at absent"),
    ("export absent new", "absent/config.json is missing: expected a run folder made by `polysketch train`"),
    ("export run new --checkpoint step-1", "no checkpoint 'step-1' in run/checkpoints: found step-00000007"),
    ("export run full", "expected a new or empty folder, found full with contents"),
    ("export absent new --format onnx", "absent/config.json is missing: expected a run folder made by"),
    ("export run full --format torch-export", "expected a new or empty folder, found full with contents"),
    ("import absent new", "expected a folder that `polysketch export` wrote, found no config.json in absent"),
    ("import run new", "run is the folder of a run already: evaluate or generate from it, or export it"),
    ("import model new", "expected a model of type polysketch in model, found 'gpt2'"),
    ("import model full", "expected a new or empty folder, found full with contents"),
    ("convert model --data absent --out new", "expected a prepared folder, found nothing at absent"),
    ("convert absent --data data --out new --context 64", "found no absent/config.json"),
    ("convert model --data data --out full --context 64", "full: expected an empty folder or a run folder"),
    ("convert model --data data --out new --context 99999", "at least 100000 tokens in the train split of data"),
    ("convert model --data data --out new --context 64 --layers last", "--layers: expected all, -4 or 0,1,2, found 'l"),
    ("benchmark attention --out absent/record.json", "expected a folder absent for --out, found none"),
    ("benchmark attention --plot absent/plot.png", "expected a folder absent for --plot, found none"),
]

MECHANISM = "unknown attention mechanism 'nope'; known mechanisms: based, focused, "
WAY = "unknown way to attend 'nope'; expected sdpa, given, learned, random, or a mechanism: softmax, "
PRESET = "unknown preset 'nope'; known presets: gpt2-small, "
WRONG_NAMES = [
    ("train --data data --out new --context 64 --attention nope", MECHANISM),
    ("train --data data --out new --context 64 --attention based,nope,short-convolution", MECHANISM),
    ("train --data data --out new --context 64 --preset nope", PRESET),
    ("convert model --data data --out new --context 64 --attention nope", MECHANISM),
    ("benchmark hyper --out absent/record.json", "expected a folder absent for --out, found none"),
    ("benchmark attention --mechanisms nope", WAY),
    ("benchmark attention --mechanisms all performer:num_features=8 sdpa given learned nope", WAY),
    ("benchmark training --models nope", WAY),
    ("benchmark training --preset nope", PRESET),
    ("benchmark decoding --models learned linear:a=1 nope", WAY),
    ("benchmark pictures --models learned linear:a=1 nope", WAY),
    ("benchmark decoding --preset nope", PRESET),
    ("benchmark pictures --preset nope", PRESET),
    ("benchmark serving --mechanisms nope", WAY),
    ("benchmark serving --preset nope", PRESET),
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


def told(line: str, message: str) -> str:
    """Code that runs a command line which ends with a message of one line."""
    return f"""
import contextlib, io
from polysketch.cli import main
with contextlib.redirect_stderr(io.StringIO()) as error:
    assert main({line.split()!r}) == 1
assert {message!r} in error.getvalue(), error.getvalue()
assert len(error.getvalue().splitlines()) == 1, error.getvalue()
"""


@pytest.fixture(scope="module")
def loaded_by_message(places):
    """What commands given a wrong place or name load beside numpy; none of them changes a file."""
    before = sorted(places.rglob("*"))
    codes = [told(*wrong) for wrong in WRONG_PLACES + WRONG_NAMES]
    first = f"import numpy\n{VERBS_LOADED}\nos.chdir({str(places)!r})"
    loaded = loaded_by_each(codes, first=first, program=TURNS)
    assert sorted(places.rglob("*")) == before
    return loaded


@pytest.mark.parametrize(("line", "message"), WRONG_PLACES + WRONG_NAMES)
def test_a_wrong_place_or_name_is_told_before_torch_or_transformers_is_loaded(line, message, loaded_by_message):
    """They take a second, and several: as long as the message would wait."""
    assert loaded_by_message(told(line, message)) == {"numpy"}


def test_every_command_with_a_place_is_given_a_wrong_one():
    assert {line.split()[0] for line, _ in WRONG_PLACES} == VERBS.keys()


def flags_of(function: Callable) -> set[str]:
    """The names of the flags that the function of a command takes."""
    return {field.name for field in dataclasses.fields(next(iter(typing.get_type_hints(function).values())))}


def test_every_flag_that_names_a_mechanism_is_given_a_wrong_one():
    commands = {verb: flags_of(function_of(verb)) for verb in VERBS}
    commands |= {f"benchmark {name}": flags_of(function) for name, function in BENCHMARKS.items()}
    naming = {"attention", "mechanisms", "models", "preset"}
    takes = {(command, flag) for command, flags in commands.items() for flag in flags & naming}
    given = {
        (c, f) for c in commands for f in naming for line, _ in WRONG_NAMES if line.startswith(c) and f" --{f} " in line
    }
    assert len(takes) == 12
    assert takes <= given


def test_importing_the_library_alone_loads_nothing():
    assert loaded_by("import polysketch; dir(polysketch)") == set()
    assert loaded_by("from polysketch.training import TrainingConfig") == set()
    assert loaded_by("from polysketch.conversion import ConversionConfig") == set()
    assert loaded_by("from polysketch.models import PRESETS; from polysketch.nn import SHORT_CONVOLUTION") == set()


def test_the_names_of_mechanisms_are_read_without_their_files():
    code = "from polysketch.attention import MECHANISMS as table; assert 'softmax' in table and 'local' in list(table)"
    assert loaded_by(f"{code}; assert 'nope' not in table; print(table, len(table))") == set()


NAMES = """
import sys
import polysketch
polysketch.attention.LocalAttention, polysketch.attention.MECHANISMS["softmax"]
assert "polysketch.attention.softmax" in sys.modules and "polysketch.attention.hyper" not in sys.modules
polysketch.ops.linear_attention, polysketch.models.TransformerLM
from polysketch import attention, models, ops
from polysketch.training import *
train, TrainingConfig, RunDescription
from polysketch.data import *
TrainingWindows, PreparedData
from polysketch.attention import *
build, Mechanism, KeyValueState, NystromAttention, SkyformerAttention, PolysketchPaperAttention
from polysketch.models import *
ModelConfig, token_losses, preset, TransformerLM
from polysketch.nn import *
SHORT_CONVOLUTION, build_mixer, TransformerBlock
"""

OTHER_NAMES = """
import polysketch
from polysketch import attention, conversion, data, models, nn, training
for package in (polysketch, attention, conversion, data, models, nn, training):
    try:
        package.nothing
    except AttributeError as error:
        assert f"module {package.__name__!r} has no attribute 'nothing'" == str(error)
    else:
        raise AssertionError(package)
"""


COMPUTED = {
    "generate": ("generate", "--prompt", "text", "--max-new-tokens", "20"),
    "evaluate": ("evaluate", "--split", "validation", "--context", "32"),
    "benchmark": ("benchmark", "attention", "--mechanisms", "all", "--lengths", "64", "--local", "16", "--heads", "2"),
}


UNWANTED = ("torch._dynamo", "torch._inductor", "sympy", "scipy", "matplotlib", "datasets", "tensorboard")


def computing(name: str, run: Path) -> str:
    """Code that runs a command of `COMPUTED`, and loads nothing unwanted."""
    verb, *rest = COMPUTED[name]
    given = {"generate": [run], "evaluate": [run, "--data", run.parent / "data"]}.get(verb, [])
    code = command(verb, *map(str, given), *rest, "--device", "cpu")
    return f"{code}\nimport sys\nassert not {set(UNWANTED)!r} & sys.modules.keys()"


@pytest.fixture(scope="module")
def loaded_by_command(run):
    return loaded_by_each([computing(name, run) for name in COMPUTED], first="import torch")


@pytest.mark.parametrize("name", COMPUTED)
def test_a_command_without_gradients_computes_without_the_compiler(name, run, loaded_by_command):
    """The first call of an operator of PyTorch's would load it: as long a wait again as for torch."""
    assert loaded_by_command(computing(name, run)) == {"torch", "numpy"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose model is as it was initialised, and data beside it."""
    there = tmp_path_factory.mktemp("finished")
    for split in ("train", "validation"):
        (there / "text" / split).mkdir(parents=True)
        (there / "text" / split / "text.txt").write_text("words and more words\n" * 50)
    data.prepare([there / "text"], "bytes", there / "data", progress=False)
    server_process.write_run(there / "run", models.TransformerLM(models.preset("tiny", num_layers=2)))
    return there / "run"


def test_every_way_of_asking_for_a_name_finds_it(loaded_beside_torch):
    assert "torch" in loaded_beside_torch(NAMES)


@pytest.mark.parametrize("package", [attention, benchmarking, conversion, data, models, nn, training])
def test_no_name_is_hidden_by_a_module_of_the_same_name(package):
    """An imported module is an attribute of its package, which would then not be asked for the name."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)


def test_other_names_are_missing_as_in_any_module():
    assert loaded_by(OTHER_NAMES) <= {"numpy"}


COMPUTING = ("generation", "training.trainer", "benchmarking.workbench")  # which import ops and models


IMPORTING = "\n".join(
    f"import sys, polysketch.{module}; assert not {{'torch._dynamo', 'triton', 'transformers'}} & sys.modules.keys()"
    for module in COMPUTING
)
"""And not the compiler with them, which takes as long as all of torch besides."""


@pytest.fixture(scope="module")
def loaded_beside_torch():
    codes = [IMPORTING, NAMES, *map(counting, (True, False))]
    return loaded_by_each(codes, first="import torch")


def test_what_computes_loads_torch_and_neither_triton_nor_the_compiler_nor_transformers(loaded_beside_torch):
    assert loaded_beside_torch(IMPORTING) == {"torch", "numpy"}


COUNTED = """
{imports}
import torch
query = torch.ones(1, 1, 8, 4)
with FlopCounterMode(display=False) as counter:
    ops.linear_attention(query, query, query, causal=True, backend="chunked")
assert torch.ops.polysketch.linear_attention in counter.get_flop_counts()["Global"], counter.get_flop_counts()
"""


def counting(ours_first: bool) -> str:
    """Code that counts the operations of a call, with the counter imported after the module of the call or before."""
    imports = [
        "from polysketch import ops; ops.linear_attention",
        "from torch.utils.flop_counter import FlopCounterMode",
    ]
    return COUNTED.format(imports="\n".join(imports if ours_first else reversed(imports)))


@pytest.mark.parametrize("ours_first", [True, False])
def test_operations_are_counted_whichever_is_imported_first(ours_first, loaded_beside_torch):
    """The counter loads Triton: it gets our formulas when a program loads it."""
    assert "torch" in loaded_beside_torch(counting(ours_first))


def test_a_table_on_demand_loads_an_entry_when_it_is_asked_for():
    table = TableOnDemand("json", {"reader": "decoder.JSONDecoder", "nothing": "absent.Nothing"})
    assert list(table) == ["reader", "nothing"]
    assert "nothing" in table
    assert "decoder" not in table
    assert table.to_load() == {"decoder": ["JSONDecoder"], "absent": ["Nothing"]}
    assert table["reader"] is json.JSONDecoder
    assert table.to_load() == {"absent": ["Nothing"]}
    with pytest.raises(ModuleNotFoundError, match=r"json\.absent"):
        table["nothing"]
    with pytest.raises(KeyError, match="decoder"):
        table["decoder"]


def test_a_table_on_demand_is_changed_like_a_dictionary():
    table = TableOnDemand("json", {"reader": "decoder.JSONDecoder", "writer": "encoder.JSONEncoder"})
    table["writer"] = table["number"] = int
    assert table == {"reader": json.JSONDecoder, "writer": int, "number": int}
    del table["reader"]
    assert (len(table), repr(table)) == (2, "TableOnDemand(writer, number)")
