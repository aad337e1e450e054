"""The approximation experiment: what it prints and writes, on Gaussian vectors and on a trained model's."""

import json
import math
from pathlib import Path

import pytest
from experiments.llops import approximation
from experiments.llops.contenders import APPROXIMATIONS
from experiments.study.command import run_command

from polysketch.cli import main

FEW = ["--maps", "random", "llops", "--mechanisms", "performer", "--degrees", "2"]


def benchmark(*flags: str) -> int:
    """Exit status of the command at a tiny size."""
    arguments = ["--size", "smoke", "--device", "cpu", *flags]
    return run_command("approximation", approximation.run, arguments, sizes=approximation.SIZES)


def test_tables_a_record_and_a_plot_are_made_of_every_map_and_mechanism(tmp_path, capsys):
    out, plot = tmp_path / "record.json", tmp_path / "plot.png"
    assert benchmark("--degrees", "2", "4", "--json", "--out", str(out), "--plot", str(plot)) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads(out.read_text())
    assert {"device", "torch", "commit", "polysketch"} <= found["environment"].keys()
    maps = [one for one in found["measurements"] if one["kind"] == "map"]
    assert len(maps) == 2 * 2 * (3 + 6)
    for one in maps:
        assert all(math.isfinite(one[part][name]) for part in ("fitted", "held_out") for name in one[part])
        assert any(one["series"] in line and f"{one['held_out']['frobenius']:.3f}" in line for line in lines[:-1])
        assert one["held_out"]["ratio"] >= 1 or one["held_out"]["optimum"] < 1e-9
    mechanisms = [one for one in found["measurements"] if one["kind"] == "mechanism"]
    assert {one["mechanism"] for one in mechanisms} == set(APPROXIMATIONS)
    assert plot.stat().st_size > 1_000


def test_a_mechanism_whose_window_covers_the_text_is_exact_and_none_is_beyond_it(tmp_path):
    out = tmp_path / "record.json"
    assert (
        benchmark("--mechanisms", "sliding-window", "--maps", "random", "--features", "16", "64", "--out", str(out))
        == 0
    )
    found = [one for one in json.loads(out.read_text())["measurements"] if one["kind"] == "mechanism"]
    for one in found:
        assert (one["frobenius"] < 1e-6) == (one["features"] >= one["length"])
        assert one["length"] < 32 or one["exact_beyond"]["32"] > 0.01
        assert one["length"] < 32 or (one["beyond"]["32"] == 0) == (one["features"] == 16)


def test_a_seed_gives_the_figures(tmp_path):
    found = []
    for seed in ("0", "0", "1"):
        out = tmp_path / "record.json"
        assert benchmark(*FEW, "--seed", seed, "--out", str(out)) == 0
        found.append([one["held_out"] for one in json.loads(out.read_text())["measurements"] if one["kind"] == "map"])
    assert found[0] == found[1] != found[2]


@pytest.fixture
def trained(tmp_path) -> Path:
    """A run of two steps on a few kilobytes of text."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text("\n\n".join(f"On day {day} the sun rose {day % 7} times over the hills." for day in range(400)))
    shares = ["--validation-share", "0.3", "--test-share", "0.1"]
    assert main(["prepare", str(text), "--tokenizer", "bytes", "--cut-text", "500", "--out", str(data), *shares]) == 0
    sizes = ["--preset", "tiny", "--layers", "3", "--context", "64", "--steps", "2", "--batch-size", "2"]
    flags = ["--attention", "softmax", "--eval-every", "0", "--device", "cpu", "--out", str(run)]
    assert main(["train", "--data", str(data), *sizes, *flags]) == 0
    return run


def test_the_queries_and_keys_of_a_trained_model_are_taken_layer_by_layer(trained, tmp_path, capsys):
    out = tmp_path / "record.json"
    assert benchmark(*FEW, "--run", str(trained), "--heads", "0", "1", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    names = [f"layer {layer} head {head}" for layer in (0, 1, 2) for head in (0, 1)]
    assert list(dict.fromkeys(one["inputs"] for one in found["measurements"])) == names
    assert "trained for 2 steps with softmax attention" in capsys.readouterr().out
    assert benchmark(*FEW, "--run", str(trained), "--layers", "5") == 1
    assert "expected layers from 0 to 2, found 5" in capsys.readouterr().err
    assert benchmark(*FEW, "--run", str(trained), "--fit-tokens", "1000000") == 1
    assert "tokens in that part of the split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--maps", "nonsense"], 2, "unknown map 'nonsense'; known: random, network, llops"),
        (["--mechanisms", "nonsense"], 2, "unknown mechanism 'nonsense'"),
        (["--steps", "0"], 2, "expected steps of at least 1"),
        (["--threads", "0"], 2, "expected --threads of at least 1"),
        (["--plot", "plot.txt"], 1, "expected --plot to end in .png"),
        (["--run", "absent"], 1, "absent"),
        ([*FEW, "--fit-tokens", "30"], 1, "expected at least 50 tokens, found 30"),
    ],
)
def test_what_cannot_work_is_refused(flags, status, message, capsys):
    if status == 2:  # how tyro ends after wrong usage
        with pytest.raises(SystemExit, match="2"):
            benchmark(*flags)
    else:
        assert benchmark(*flags) == status
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
