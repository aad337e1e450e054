"""The command line as a whole: help, exit statuses, one line for a failure."""

import errno
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

import polysketch
from polysketch import cli
from polysketch.cli import main
from polysketch.studies.finished import Stopped, require_finished
from polysketch.training import TrainingResult


@dataclass(frozen=True)
class StandInFlags:
    """A verb for tests."""

    size: int = 3
    """how much"""


@pytest.fixture
def stand_in_verb(monkeypatch):
    """Put a `run` that raises or returns what a test wants in the place of a verb."""

    def install(outcome: BaseException | int) -> list[str]:
        def run(flags: StandInFlags) -> int:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome + flags.size

        module = types.ModuleType("polysketch.cli.evaluate")
        monkeypatch.setattr(module, "run", run, raising=False)
        monkeypatch.setitem(sys.modules, "polysketch.cli.evaluate", module)
        return ["evaluate"]

    return install


def test_help_is_for_a_newcomer(capsys):
    """Every verb with a word on what it does, and the first commands to type."""
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    for verb in ("prepare", "train", "evaluate", "generate"):
        assert f"  {verb} " in output
        assert f"polysketch {verb} " in output


def test_the_version_is_the_packages(capsys):
    """And nothing else."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"polysketch {polysketch.__version__}\n"


def test_python_m_polysketch_is_the_command():
    """Without any installed script."""
    command = [sys.executable, "-m", "polysketch", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("polysketch ")


def test_the_first_steps_of_the_help_work_in_order(tmp_path, monkeypatch, capsys):
    """Prepare, train, evaluate and generate, each reading what the one before wrote."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for number in range(60):
        (tmp_path / "my_texts" / f"{number}.txt").write_text(f"Once upon a time there were {number} foxes. " * 5)
    sizes = ["--attention", "softmax", "--context", "32", "--batch-size", "2", "--steps", "2", "--device", "cpu"]
    assert main(["prepare", "my_texts", "--tokenizer", "bytes", "--out", "data", "--no-progress"]) == 0
    assert main(["train", "--data", "data", "--preset", "tiny", "--out", "runs/first", *sizes]) == 0
    assert main(["evaluate", "runs/first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 2
    assert main(["generate", "runs/first", "--prompt", "Once upon a time", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "benchmark"])
def test_every_verb_explains_its_flags(capsys, verb):
    """With its own name, and a description."""
    assert main([verb, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"polysketch {verb}" in output
    assert "--" in output


def test_a_verb_gets_its_flags_and_gives_the_exit_status(stand_in_verb):
    """Parsed by the dataclass that `run` is annotated with."""
    assert main(stand_in_verb(0)) == 3
    assert main([*stand_in_verb(0), "--size", "0"]) == 0


@pytest.mark.parametrize(
    "arguments", [[], ["evalute"], ["evaluate", "--no-such-flag"], ["evaluate", "--size", "x"], ["--no-such-flag"]]
)
def test_wrong_usage_is_status_2(capsys, stand_in_verb, arguments):
    """With an explanation on stderr and nothing on stdout."""
    stand_in_verb(0)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("expected 3, found 4:\n  a likely cause"), "expected 3, found 4: a likely cause"),
        (FileNotFoundError("expected a run, found nothing"), "expected a run, found nothing"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.txt"), "no such file or directory: x.txt"),
        (PermissionError(errno.EACCES, "Permission denied", "x.txt"), "permission denied: x.txt"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x.bin"),
            "no space left on the disk: x.bin: free some and run the same command again",
        ),
        (ImportError("tyro is missing: pip install 'polysketch[train]'"), None),
        (
            ModuleNotFoundError("No module named 'datasets.load'", name="datasets.load"),
            "the package 'datasets' is needed here and not installed: pip install 'polysketch[hf]'",
        ),
        (RuntimeError("the run folder is in use"), "the run folder is in use"),
        (ValueError(), "ValueError"),
        (Exception("Input/output error (os error 5)"), "Input/output error (os error 5)"),  # of tokenizers
    ],
)
def test_a_known_failure_is_one_line_and_status_1(capsys, stand_in_verb, error, line):
    """Without a traceback, whatever line breaks its message had."""
    assert main(stand_in_verb(error)) == 1
    assert capsys.readouterr().err == f"polysketch: {line if line is not None else error}\n"


def test_traceback_shows_where(stand_in_verb):
    """The error itself, when asked for."""
    with pytest.raises(ValueError, match="expected"):
        main(["--traceback", *stand_in_verb(ValueError("expected"))])


def test_a_mistake_of_ours_is_not_hidden(stand_in_verb):
    """What bad input does not raise keeps its traceback."""
    with pytest.raises(AssertionError):
        main(stand_in_verb(AssertionError("impossible")))


def test_an_interrupt_is_status_130(capsys, stand_in_verb):
    """As the shell counts Ctrl-C."""
    assert main(stand_in_verb(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "polysketch: interrupted\n"


@pytest.mark.parametrize(("number", "status"), [(None, 130), (2, 130), (15, 143)])
def test_work_of_several_runs_ends_with_the_status_of_the_signal_that_stopped_one(
    capsys, stand_in_verb, number, status
):
    result = TrainingResult(Path("run"), 3, "time" if number is None else "signal", number)
    with pytest.raises(Stopped) as stopped:
        require_finished(result)
    assert main(stand_in_verb(stopped.value)) == status
    assert capsys.readouterr().err == "polysketch: interrupted\n"


def test_what_is_finished_is_gone_on_with():
    require_finished(TrainingResult(Path("run"), 3, "finished"))


NO_EXTRAS = """
import contextlib, io, json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tyro", "safetensors", "tokenizers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from polysketch.cli import main
def ended(line):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        return main(line.split()), told.getvalue()
print(json.dumps([ended(line) for line in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def run_without_extras():
    """A function that gives the exit status of a command line on a bare installation, and what it wrote on stderr."""
    lines = ["prepare x", "train x", "evaluate x", "--help", "--version"]
    ended = subprocess.run([sys.executable, "-c", NO_EXTRAS, *lines], capture_output=True, text=True, check=True)
    found = dict(zip(lines, json.loads(ended.stdout), strict=True))
    return lambda line: found[line]


@pytest.mark.parametrize("verb", ["prepare", "train", "evaluate"])
def test_without_the_extra_a_verb_names_the_pip_command(verb, run_without_extras):
    """In one line, status 1."""
    status, told = run_without_extras(f"{verb} x")
    assert status == 1
    assert len(told.splitlines()) == 1
    assert "pip install 'polysketch[train]'" in told


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_need_no_extra(flag, run_without_extras):
    """A bare installation can still say what it is."""
    assert run_without_extras(flag)[0] == 0


LONG_OUTPUT = """
import sys
from polysketch import cli
cli._run_verb = lambda verb, arguments: print("x" * 10**6) or 0
sys.exit(cli.main(["train"]))
"""


def test_a_reader_that_goes_away_is_no_error():
    """`polysketch ... | head -0`: no traceback."""
    command = [sys.executable, "-c", LONG_OUTPUT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_a_closed_standard_stream_is_no_mistake(closed, tmp_path):
    """Nor may a file of ours take its number and get what is printed."""
    (tmp_path / "text.txt").write_text("words and words\n" * 50)
    arguments = "prepare text.txt --out data --validation-share 0 --test-share 0"
    command = f'exec "{sys.executable}" -m polysketch {arguments} {closed}>&-'
    finished = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert main(["prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data")]) == 1  # it is there
