"""`polysketch train`: killed at any moment and repeated, the same command ends as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polysketch.attention import MECHANISMS
from polysketch.cli import main
from polysketch.cli.attention_options import parse_attention_options, parse_options_by_name
from polysketch.cli.train import TrainFlags, configuration
from polysketch.models import preset
from polysketch.models.presets import EVERY, PRESETS
from polysketch.training import load_model
from polysketch.training.checkpoint import list_checkpoints, load_checkpoint
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.step import Updater

TIMES = ("seconds", "tokens_per_second")
STARTED = "parameters on"  # in the line that a process prints when it begins to make steps


def flags(data: Path, out: Path, *more: str) -> list[str]:
    """The command line of a small run."""
    sizes = ["--layers", "1", "--context", "32", "--batch-size", "2", "--threads", "1", "--device", "cpu"]
    options = [
        "--attention",
        "polysketch-paper",
        "--attention-options",
        "sketch_size=8",
        "local_chunk=8",
        "prefix_gain=0.5",
    ]
    rhythm = ["--log-every", "1", "--eval-every", "10", "--eval-tokens", "60", "--save-every", "2", "--no-tensorboard"]
    return ["train", "--data", str(data), "--out", str(out), *sizes, *rhythm, *options, *more]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start the real command in a process of its own."""
    command = [sys.executable, "-m", "polysketch", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Wait until the process has printed a line with `text`."""
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the process ended without printing {text!r}")


def kill_after(arguments: list[str], seconds: float, *, started: bool) -> bool:
    """Kill the command after `seconds`, counted from its first step or from its start; whether it was still running."""
    with start(arguments) as process:
        if started:
            wait_for(process, STARTED)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


def finish(arguments: list[str]) -> float:
    """Run the command to its end, in this process, which has PyTorch already; returns the seconds that it took."""
    began = time.monotonic()
    assert main(arguments) == 0
    return time.monotonic() - began


def outcome(out: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Metrics but for times, and all tensors of the last checkpoint."""
    lines = MetricsFile(out / "metrics.jsonl").read()
    last = load_checkpoint(list_checkpoints(out / "checkpoints")[-1])
    metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    return metrics, {**last.model, **last.optimizer, **last.random}


def check_killed_runs(
    data: Path, folder: Path, steps: int, moments: Callable[[float], list[tuple[float, bool]]]
) -> None:
    """Kill a run at the moments that the length of the undisturbed run gives, finish it, and compare."""
    more = ("--steps", str(steps), "--resume")
    seconds = finish(flags(data, folder / "left-alone", *more))
    killed = flags(data, folder / "killed", *more)
    hits = [kill_after(killed, delay, started=started) for delay, started in moments(seconds)]
    assert sum(hits) >= len(hits) / 2, "most kills came too late to prove anything"
    finish(killed)
    (metrics, tensors), (expected_metrics, expected) = outcome(folder / "killed"), outcome(folder / "left-alone")
    assert metrics == expected_metrics
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.full  # distributed/test_runs.py kills a process, test_resume.py stops runs at more moments
def test_killed_at_random_moments_it_ends_with_the_same_weights_and_metrics(data_folder, tmp_path):
    generator = random.Random(0)

    def moments(seconds: float) -> list[tuple[float, bool]]:
        return [(generator.uniform(0.0, seconds / 4), True) for _ in range(2)]

    check_killed_runs(data_folder, tmp_path, 40, moments)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_twenty_random_moments_it_ends_with_the_same_weights_and_metrics(data_folder, tmp_path, seed):
    """Mostly between steps and in checkpoints, sometimes while starting."""
    generator = random.Random(seed)

    def moments(seconds: float) -> list[tuple[float, bool]]:
        running = [(generator.uniform(0.0, seconds / 12), True) for _ in range(16)]
        starting = [(generator.uniform(0.5, 6.0), False) for _ in range(4)]
        return generator.sample(running + starting, 20)

    check_killed_runs(data_folder, tmp_path, 400, moments)


def test_sigterm_saves_stops_with_143_and_the_lock_keeps_a_second_command_out(
    data_folder, tmp_path, capfd, monkeypatch
):
    """In this process, which need not import PyTorch first; a signal from outside is in the full product."""
    arguments = flags(data_folder, tmp_path / "run", "--steps", "100000", "--save-every", "100000", "--resume")
    compute_gradient, refused = Updater.compute_gradient, []

    def signalled(self, batch):
        if not refused:
            capfd.readouterr()
            refused.extend((main(arguments), capfd.readouterr().err))
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_gradient(self, batch)

    monkeypatch.setattr(Updater, "compute_gradient", signalled)
    assert main(arguments) == 143
    status, told = refused
    assert status == 1
    assert f"in use by process {os.getpid()}" in told
    assert len(told.splitlines()) == 1
    assert load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1]).state["step"] == 1
    ending = capfd.readouterr().err
    assert "stopped after step 1 of 100000" in ending
    assert "--resume" in ending


@pytest.mark.full
def test_sigterm_saves_stops_with_143_and_the_lock_keeps_a_second_process_out(data_folder, tmp_path, capfd):
    arguments = flags(data_folder, tmp_path / "run", "--steps", "100000", "--save-every", "100000", "--resume")
    with start(arguments) as process:
        wait_for(process, "validation loss")
        assert main(arguments) == 1
        refused = capfd.readouterr().err
        process.send_signal(signal.SIGTERM)
        ending = process.stderr.read()
    assert process.returncode == 143
    assert f"in use by process {process.pid}" in refused
    assert len(refused.splitlines()) == 1
    last = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    step = load_checkpoint(last).state["step"]
    assert step >= 10
    assert f"stopped after step {step} of 100000" in ending
    assert "--resume" in ending


@pytest.fixture
def fast_flags(data_folder, tmp_path):
    """A function that gives the command line of a run of one step."""
    return lambda *more: flags(data_folder, tmp_path / "run", "--steps", "1", *more)


def test_a_finished_run_says_where_everything_is_and_what_to_do_next(fast_flags, tmp_path, capfd):
    assert main(fast_flags()) == 0
    run = tmp_path / "run"
    told = capfd.readouterr().err.splitlines()
    assert told[-2:] == [f"finished: 1 steps, everything is in {run}", f"next: polysketch evaluate {run}"]


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["--steps", "ten"], 2, "--steps"),
        (["--no-such-flag"], 2, "--no-such-flag"),
        (["--batch-size", "0"], 2, "--batch-size: expected at least 1, found 0"),
        (["--data", "nowhere"], 1, "nowhere"),
        (["--attention", "softmaxx"], 1, "softmaxx"),
        (["--attention", "nystrom", "--attention-options"], 1, "'nystrom' cannot be causal"),
        (["--attention", "based,skyformer", "--layers", "2", "--attention-options"], 1, "'skyformer' cannot be causal"),
        (["--attention", "based,local"], 1, "expected NAME.key=value, where NAME is one of based, local; found 'sketc"),
        (["--attention", "based,local", "--attention-options"], 1, "pattern whose length divides the layers: 1 layers"),
        (["--attention", "based,", "--attention-options"], 1, "unknown attention mechanism ''"),
        (["--attention-options", "size"], 1, "expected key=value, found 'size'"),
        (["--context", "1000000"], 1, "expected at least 1000001 training tokens"),
        (["--init-from", "nowhere"], 1, "expected a run folder made by"),
    ],
)
def test_bad_input_is_explained_with_the_right_exit_status(fast_flags, capfd, more, status, message):
    assert main(fast_flags(*more)) == status
    shown = capfd.readouterr().err
    assert message in shown
    assert status == 2 or len(shown.splitlines()) == 1


def test_a_run_without_resume_is_refused_and_intact(fast_flags, tmp_path, capfd):
    assert main(fast_flags()) == 0
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    capfd.readouterr()
    assert main(fast_flags()) == 1
    assert "already holds a run: give --resume" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def options_of(run: Path) -> dict:
    """What its configuration says of its flags."""
    return json.loads((run / "config.json").read_text())["training"]


def test_a_run_is_all_that_resume_needs(fast_flags, tmp_path, monkeypatch, capfd):
    """Every option is the run's, the mechanism's too, from whichever folder; what is given again must agree."""
    assert main(fast_flags("--steps", "4", "--carry-state", "--betas", "0.8", "0.9")) == 0
    whole, begun = outcome(tmp_path / "run"), options_of(tmp_path / "run")
    for step in ("3", "4"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{int(step):08}", ignore_errors=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--out", "../run", "--resume"]) == 0
    assert options_of(tmp_path / "run") == begun | {"resume": True, "out": "../run"}
    again = outcome(tmp_path / "run")
    assert again[0] == whole[0]
    assert all(torch.equal(again[1][name], whole[1][name]) for name in whole[1])
    assert main(["train", "--out=../run", "--resume", "--carry-state", "--extend", "--steps", "5"]) == 0
    capfd.readouterr()
    assert main(["train", "--out", "../run", "--resume", "--no-carry-state"]) == 1
    assert "--carry-state was True and is now False" in capfd.readouterr().err
    assert main(["train", "--out", "../run", "--resume", "--attention", "softmax"]) == 1
    assert "--attention was polysketch-paper and is now softmax" in capfd.readouterr().err


def test_resume_of_no_run_says_that_it_is_none(tmp_path, capfd):
    """The folder may be misspelt; the data of a run that is there need not be given."""
    assert main(["train", "--out", str(tmp_path / "none"), "--resume"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "none/config.json is missing: expected a run folder" in line
    assert "give --data to begin a run" in line
    assert main(["train", "--resume"]) == 2
    assert "--data" in capfd.readouterr().err


def test_resume_of_a_damaged_run_says_what_is_damaged(tmp_path, capfd):
    (tmp_path / "config.json").write_text("{}")
    assert main(["train", "--out", str(tmp_path), "--resume"]) == 1
    assert "config.json: expected the entries of a run's configuration" in capfd.readouterr().err


def test_init_from_gives_the_sizes_of_the_model(fast_flags, tmp_path):
    """But not the steps, the learning rate or the data, which are the new run's."""
    assert main(fast_flags("--learning-rate", "1e-3")) == 0
    data = options_of(tmp_path / "run")["data"]
    new = ["--context", "16", "--batch-size", "2", "--steps", "1", "--device", "cpu"]
    first = str(tmp_path / "run")
    assert main(["train", "--data", data, "--out", str(tmp_path / "new"), "--init-from", first, *new]) == 0
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("run", "new"))
    assert after["model"] == before["model"]
    assert after["training"]["learning_rate"] == TrainFlags.learning_rate != before["training"]["learning_rate"]


def test_help_explains_every_flag(capfd):
    assert main(["train", "--help"]) == 0
    shown = capfd.readouterr().out
    for name in TrainFlags.__dataclass_fields__:
        assert "-" + name.replace("_", "-") in shown
    assert "Peak learning rate" in shown
    assert "key=value" in shown


def test_a_pattern_repeats_over_the_layers_and_trains(fast_flags, tmp_path):
    mixture = ["--attention", "based,sliding-window", "--layers", "4", "--attention-options", "sliding-window.window=8"]
    assert main(fast_flags(*mixture)) == 0
    model, _ = load_model(tmp_path / "run")
    assert model.config.layers() == [("based", {}), ("sliding-window", {"window": 8})] * 2
    before = outcome(tmp_path / "run")
    assert main([*fast_flags(*mixture), "--resume", "--extend", "--steps", "2"]) == 0
    assert len(outcome(tmp_path / "run")[0]) > len(before[0])
    assert main(fast_flags("--resume", "--extend", "--steps", "2")) == 1


def test_rotary_positions_are_as_asked_for_and_stay_so(fast_flags, tmp_path, capfd):
    assert main(fast_flags("--rotary", "False")) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["rotary"] is False
    assert main(fast_flags("--resume")) == 0
    capfd.readouterr()
    assert main(fast_flags("--resume", "--rotary", "True")) == 1
    assert "--rotary was False and is now True" in capfd.readouterr().err


def test_a_run_from_before_a_model_option_existed_can_be_resumed(fast_flags, tmp_path, capfd):
    assert main(fast_flags("--projection-convolution", "0", "--query-key-norm", "False", "--head-gate", "False")) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["model"]["rotary"], config["model"]["input_positions"], config["sha256"]
    config |= {"format": 1, "training": config["training"] | {"attention": "polysketch"}}
    config["model"]["attention"] = "polysketch"
    for name in ("projection_convolution", "query_key_norm", "head_gate"):
        del config["model"][name], config["training"][name]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert main(fast_flags("--resume")) == 0
    config["model"]["rope_base"] = 500.0
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    capfd.readouterr()
    assert main(fast_flags("--resume")) == 1
    assert "the preset or the defaults of the mechanism changed" in capfd.readouterr().err


def test_a_mechanism_asked_for_by_name_stands_in_every_layer_and_the_presets_own_in_every_second(tmp_path, data_folder):
    def layers(*flags: str) -> list[str]:
        out = tmp_path / "-".join(("run", *flags))
        common = [
            "--data",
            str(data_folder),
            "--out",
            str(out),
            "--preset",
            "tiny",
            "--context",
            "16",
            "--batch-size",
            "1",
        ]
        assert main(["train", *common, "--steps", "1", "--eval-every", "0", *flags]) == 0
        assert flags or main(["train", "--out", str(out), "--resume"]) == 0
        return [name for name, _ in load_model(out)[0].config.layers()]

    window = "sliding-window"
    assert layers() == [window, "polysketch"] * 2
    assert layers("--attention-options", "window=8") == [window, "polysketch"] * 2
    assert layers("--attention", "polysketch") == ["polysketch"] * 4
    assert layers("--attention", "softmax", "--attention-every", "2") == [window, "softmax"] * 2


def test_a_run_of_a_task_goes_on_by_its_folder_alone_and_keeps_its_layers_when_presets_change(tmp_path, monkeypatch):
    task, out = str(tmp_path / "task"), tmp_path / "run"
    assert main(["task", "induction", "--set", "length=24", "--out", task]) == 0
    shape = ["--preset", "tiny", "--layers", "2", "--batch-size", "1", "--device", "cpu", "--steps", "1"]
    with monkeypatch.context() as before:
        before.setitem(PRESETS, "tiny", {name: it for name, it in PRESETS["tiny"].items() if name != EVERY})
        assert main(["train", "--data", task, "--out", str(out), *shape, "--eval-every", "0"]) == 0
    assert main(["train", "--out", str(out), "--resume", "--extend", "--steps", "2"]) == 0
    assert list_checkpoints(out / "checkpoints")[-1].name == "step-00000002"
    assert json.loads((out / "config.json").read_text())["model"]["sizes"][EVERY] == 1


def test_what_stands_around_the_mechanism_is_trained_saved_and_not_changed_on_the_way(fast_flags, tmp_path, capfd):
    around = ["--projection-convolution", "3", "--query-key-norm", "True", "--attention-every", "2"]
    assert main(fast_flags(*around, "--head-gate", "True")) == 0
    model, _ = load_model(tmp_path / "run")
    assert model.config == replace(
        model.config, projection_convolution=3, query_key_norm=True, head_gate=True, attention_every=2
    )
    assert float(model.blocks[0].attention.head_gate.weight.detach().abs().max()) > 0
    capfd.readouterr()
    assert main(fast_flags("--resume", *around, "--head-gate", "False")) == 1
    assert "--head-gate was True and is now False" in capfd.readouterr().err
    assert main(fast_flags("--resume", "--projection-convolution", "3")) == 0  # what is not said is as in the run


def test_the_hybrid_preset_trains_with_its_own_pattern_and_some_options_changed(data_folder, tmp_path):
    sizes = ["--context", "32", "--batch-size", "2", "--threads", "1", "--device", "cpu", "--steps", "1"]
    given = ["train", "--data", str(data_folder), "--out", str(tmp_path / "run"), "--preset", "based-tiny", *sizes]
    assert main([*given, "--no-tensorboard", "--attention-options", "sliding-window.window=8"]) == 0
    config = load_model(tmp_path / "run")[0].config
    assert [name for name, _ in config.layers()] == [name for name, _ in preset("based-tiny").layers()]
    assert config.layers()[1:3] == [("based", {"feature_dim": 16}), ("sliding-window", {"window": 8})]
    assert config.rotary == ("sliding-window",)


def test_without_a_mechanism_the_presets_own_is_trained_with_options_changed(tmp_path):
    given = TrainFlags(data=tmp_path, out=tmp_path, attention_options=("sketch_size=8",))
    assert configuration(given).attention is None
    assert configuration(given).attention_options == {"sketch_size": 8}


class Example:
    """Stands for a mechanism: options of every type."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        size: int = 8,
        gain: float | None = None,
        learned: bool = True,
        kind: str = "relu",
        chunk: int | None = 4,
        weights: tuple[float, ...] = (),
    ) -> None: ...


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("size=32", {"size": 32}),
        ("gain=0.5", {"gain": 0.5}),
        ("gain=none", {"gain": None}),
        ("learned=false", {"learned": False}),
        ("kind=elu", {"kind": "elu"}),
        ("chunk=None", {"chunk": None}),
        ("weights=1,2.5", {"weights": (1.0, 2.5)}),
    ],
)
def test_options_take_the_type_that_the_mechanism_declares(pair, expected):
    found = parse_attention_options([pair], Example, "example")
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["size"], "expected key=value, found 'size'"),
        (["sice=3"], "example has no option 'sice'; its options are: size, gain, learned, kind, chunk, weights"),
        (["num_heads=3"], "no option 'num_heads'"),
        (["size=3", "size=4"], "size is given twice"),
        (["size=3.5"], "size: expected a whole number, found '3.5'"),
        (["learned=perhaps"], "learned: expected true or false, found 'perhaps'"),
        (["gain=high"], "gain: expected none or a number, found 'high'"),
        (["weights=1,x"], "weights: expected .*, found '1,x'"),
    ],
)
def test_options_that_do_not_fit_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        parse_attention_options(pairs, Example, "example")


def test_options_of_several_mechanisms_go_by_name():
    pairs = ["example.gain=0.5", "other.size=3", "example.size=4"]
    mechanisms = {"example": Example, "other": Example, "third": Example}
    assert parse_options_by_name(pairs, mechanisms) == {"example": {"gain": 0.5, "size": 4}, "other": {"size": 3}}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("gain=0.5", "expected NAME.key=value, where NAME is one of example; found 'gain=0.5'"),
        ("else.gain=0.5", "found 'else.gain=0.5'"),
        ("example.sice=3", "example has no option 'sice'"),
        ("example.size", "expected key=value, found 'size'"),
    ],
)
def test_options_of_no_mechanism_are_refused(pair, message):
    with pytest.raises(ValueError, match=message):
        parse_options_by_name([pair], {"example": Example})


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_every_mechanism_can_be_named_without_options(name, tmp_path):
    given = TrainFlags(data=tmp_path, out=tmp_path, attention=name)
    assert configuration(given).attention_options == {}
