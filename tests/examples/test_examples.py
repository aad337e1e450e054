"""Each example does what its docstring says, by the command line that stands there."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["draw_attention", "replace_attention", "train_on_a_folder", "write_a_feature_map"]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """A function that runs a script as a program in an empty folder, and returns what it printed."""
    from polysketch import attention

    before = dict(attention.MECHANISMS)
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield run
    attention.MECHANISMS.clear()
    attention.MECHANISMS.update(before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_docstring_is_the_command_line(name, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(name, "--help")
    assert stopped.value.code == 0
    help_text = capsys.readouterr().out
    (command,) = re.findall(rf"python examples/{name}\.py.*", (EXAMPLES / f"{name}.py").read_text())
    for flag in re.findall(r"--[\w-]+", command):
        assert flag in help_text


def test_replaced_attention_keeps_a_state_that_does_not_grow(run):
    lines = dict(line.split(":", 1) for line in run("replace_attention").splitlines())
    before, after = (eval(lines[key].strip()) for key in ("before", "after"))
    assert before[1000] > 8 * before[100]
    assert after[1000] == after[100] > 0
    assert "bit for bit" in lines["restored"]


def test_layers_that_stay_keep_their_cache(run):
    after = eval(run("replace_attention", "--layers", "1").splitlines()[1].partition(":")[2])
    assert after[1000] > after[100]


def test_a_model_is_trained_on_a_folder(run, tmp_path):
    words = "the state of a chunk is a sum over keys and values\n" * 20
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number}\n{words}")
    printed = run("train_on_a_folder", "text", "--steps", "12", "--context", "64", "--out", "made")
    bits = [float(value) for value in re.findall(r"([\d.]+) bits per byte", printed)]
    assert len(bits) == 2
    assert max(bits) < 6  # 8 is no model at all
    assert (tmp_path / "made/run/metrics.jsonl").exists()


def test_a_feature_map_is_exact_trains_and_decodes(run):
    printed = run("write_a_feature_map", "--steps", "15")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[1] < losses[0] - 1
    assert "the same after each" in printed
