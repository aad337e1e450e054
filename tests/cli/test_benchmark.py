"""`polysketch benchmark`: what it prints and writes, and what it refuses in one line."""

import json
import sys
from pathlib import Path

import pytest
import torch

from ops import spoiled
from polysketch import ops
from polysketch.benchmarking import measure_rates
from polysketch.cli import main
from polysketch.cli.benchmark import BENCHMARKS
from polysketch.ops.linear.backends import BACKENDS

COMMON = ["--device", "cpu", "--repeats", "1"]
SMALL = {
    "attention": ["--lengths", "64", "128", "--mechanisms", "given", "--heads", "2", "--local", "16"],
    "hyper": ["--lengths", "64", "128", "--heads", "1", "--min-length", "16", "--backward"],
    "training": ["--preset", "tiny", "--models", "random", "--contexts", "48", "--local", "16"],
    "decoding": ["--preset", "tiny", "--positions", "40", "--local", "16"],
    "pictures": ["--preset", "tiny", "--models", "linear", "--image-sizes", "16", "--patch", "4", "--local", "16"],
}


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    """Seconds of every run go into the machine's rates; here they need not be good."""
    monkeypatch.setattr("polysketch.benchmarking.workbench._COPIED_BYTES", 2**16)
    quick = lambda clock, dtype: measure_rates(clock, dtype, 64)  # noqa: E731
    monkeypatch.setattr("polysketch.benchmarking.measure_rates", quick)


def benchmark(name: str, *flags: str) -> int:
    """Exit status of the command at a tiny size."""
    return main(["benchmark", name, *SMALL[name], *COMMON, *flags])


def test_every_benchmark_has_a_small_size_here():
    """A new one is tested by being listed; `tune` needs a GPU, `serving` a server, and both have tests of their own."""
    assert SMALL.keys() | {"tune", "serving"} == BENCHMARKS.keys()


@pytest.mark.usefixtures("pixels")
@pytest.mark.parametrize("name", SMALL)
def test_a_table_a_record_and_a_plot_are_made(name, tmp_path, capsys):
    out, plot = tmp_path / "record.json", tmp_path / "plot.png"
    assert benchmark(name, "--json", "--out", str(out), "--plot", str(plot)) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads(out.read_text())
    assert found["benchmark"] == name
    assert {"device", "threads", "torch", "commit", "polysketch"} <= found["environment"].keys()
    for one in found["measurements"]:
        assert any(one["series"] in line and f"{one['ratio']:.2f}" in line for line in lines[:-1])
    assert plot.stat().st_size > 1_000


@pytest.mark.parametrize("name", SMALL)
def test_help_names_every_flag_of_a_benchmark(name, capsys):
    assert main(["benchmark", name, "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in [*filter(lambda text: text.startswith("--"), SMALL[name]), "--json", "--plot", "--threads", "--dtype"]:
        assert flag in shown


def test_help_names_every_benchmark(capsys):
    assert main(["benchmark", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_a_wrong_backend_is_refused_in_one_line_with_the_error_and_the_tolerance(monkeypatch, capsys):
    monkeypatch.setitem(BACKENDS, "wrong", spoiled.scaled(1.001))
    assert benchmark("attention", "--backend", "wrong") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "backend 'wrong') is wrong and is not timed: its output is off by 0.001" in captured.err
    assert "expected at most 0.0001" in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "nonsense"], "unknown backend 'nonsense'; expected 'auto', 'chunked'"),
        (["--device", "nonsense"], "--device: expected one of auto, cpu"),
        (["--plot", "plot.txt"], "expected --plot to end in .png, .pdf, .svg, found 'plot.txt'"),
        (["--plot", "absent/plot.png"], "expected a folder absent for --plot, found none"),
        (["--out", "absent/record.json"], "expected a folder absent for --out, found none"),
        (["--out", "."], "expected a file for --out, found the folder"),
        (["--mechanisms", "nonsense"], "unknown way to attend 'nonsense'"),
        (["--mechanisms", "linear:size=3"], "'linear' has no option 'size'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_is_timed(
    flags, message, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert benchmark("attention", *flags) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Expected one of {attention"),
        (["nonsense"], "nonsense"),
        (["attention", "--lengths", "0"], "expected lengths of at least 1"),
        (["attention", "--repeats", "0"], "expected --repeats of at least 1"),
        (["attention", "--threads", "0"], "expected --threads of at least 1"),
        (["attention", "--budget-seconds", "0"], "expected a budget of more than 0 seconds"),
        (["hyper", "--budget-seconds", "0"], "expected a budget of more than 0 seconds"),
        (["hyper", "--sample-size", "0"], "expected sample_size of at least 1"),
        (["hyper", "--lengths", "4096", "0"], "expected lengths of at least 1"),
        (["attention", "--dtype", "float8"], "float8"),
    ],
)
def test_wrong_usage_has_the_exit_status_two(arguments, message, capsys):
    assert main(["benchmark", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_mechanisms_by_name_are_timed_and_those_over_budget_keep_their_row(tmp_path, capsys):
    out = tmp_path / "record.json"
    sizes = ["--lengths", "32", "4096", "--heads", "1", "--local", "16", "--budget-seconds", "1e-6"]
    names = ["--mechanisms", "linear:kind=relu", "nystrom"]
    assert main(["benchmark", "attention", *sizes, *names, *COMMON, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "linear:kind=relu" in shown
    assert "nystrom (bidirectional)" in shown
    assert shown.count("over budget") == 3
    assert [one["over_budget"] for one in json.loads(out.read_text())["measurements"]] == [False] * 3 + [True] * 3


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert benchmark("attention", "--plot", str(tmp_path / "plot.png")) == 1
    assert "pip install 'polysketch[plot]'" in capsys.readouterr().err


def test_threads_are_as_asked_for_and_as_before_afterwards(tmp_path):
    before = torch.get_num_threads()
    out = tmp_path / "record.json"
    assert benchmark("attention", "--threads", str(before + 1), "--out", str(out)) == 0
    assert json.loads(out.read_text())["environment"]["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_bfloat16_is_checked_with_its_own_tolerance_and_timed(tmp_path):
    out = tmp_path / "record.json"
    assert benchmark("attention", "--dtype", "bfloat16", "--backward", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["dtype"] == "bfloat16"
    assert {one["direction"] for one in found["measurements"]} == {"forward+backward"}


def test_what_the_command_needs_lies_in_the_package():
    """Users have a wheel and no clone."""
    package = Path(ops.__file__).parents[1]
    files = [*package.glob("benchmarking/*.py"), *package.glob("cli/benchmark/*.py")]
    assert len(files) > 10
    assert not [
        file for file in files if "from benchmarks" in file.read_text() or "import benchmarks" in file.read_text()
    ]
