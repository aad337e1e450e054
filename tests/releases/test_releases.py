"""What every release wrote is read by today's code, and gives what it gave then.

Figures may differ by rounding, as between machines: by 1e-4 of the largest number, by 1e-3 where training
goes on, and by one answer in a thousand.
Tokens are those of the largest logits, whose leads were clear when the folder was made.
"""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import polysketch
from polysketch import attention, ops
from polysketch.cli import main
from polysketch.generation import generate
from polysketch.models.presets import PRESETS
from polysketch.training import load_model
from releases.make import state_call

HERE = Path(__file__).resolve().parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/expected.json"))
ROUNDING, TRAINED = 1e-4, 1e-3
SHARES = ("accuracy", "whole_rows")  # of thousands of answers, of which a few are ties


@pytest.fixture(params=RELEASES)
def expected(request, tmp_path, monkeypatch) -> dict:
    """What came of a release's files, which stand in the working folder."""
    shutil.copytree(HERE / request.param, tmp_path / "release")
    monkeypatch.chdir(tmp_path / "release")
    expected = json.loads(Path("expected.json").read_text())
    monkeypatch.setitem(PRESETS, expected["preset"]["name"], expected["preset"]["sizes"])
    return expected


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_this_version_has_its_folder():
    assert polysketch.__version__ in RELEASES, "run `python tests/releases/make.py` and commit what it writes"


def test_a_folder_is_small(expected):
    assert sum(path.stat().st_size for path in Path().rglob("*") if path.is_file()) < 400_000


def test_every_folder_is_whole(expected, capsys):
    assert main(["verify", "prepared", "run", "exported", "task", "task-run", "converted"]) == 0
    assert capsys.readouterr().out.count(": whole") == 6


def test_models_have_the_same_figures(expected, tmp_path):
    for name, wanted in expected["figures"].items():
        data = "task" if name == "task-run" else "prepared"
        words = ["evaluate", name, "--data", data, "--device", "cpu", "--out", str(tmp_path / "figures.json")]
        assert main(words) == 0
        found = json.loads((tmp_path / "figures.json").read_text())["figures"]
        for figure, value in wanted.items():
            near = pytest.approx(value, rel=ROUNDING, abs=1e-3 if figure in SHARES else 0)
            assert found[figure] == (value if isinstance(value, int) else near), f"{name}: {figure}"


def test_a_run_goes_on_and_comes_to_the_same_losses(expected):
    assert main(["train", "--data", "prepared", "--out", "run", "--resume"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    for step, loss in expected["train"]["losses"].items():
        assert losses[int(step)] == pytest.approx(loss, rel=TRAINED)
    assert (Path("run/checkpoints") / f"step-{expected['train']['steps']:08d}").is_dir()
    assert main(["verify", "run"]) == 0


def test_a_run_gives_the_same_tokens(expected):
    wanted = expected["generated"]
    model, described = load_model("run")
    tokens = generate(model, [wanted["prompt"]], max_new_tokens=len(wanted["tokens"]), temperature=0.0).tokens[0]
    assert list(tokens) == wanted["tokens"]
    assert described.tokenizer.decode(tokens) == wanted["text"]


def test_an_export_gives_the_same_logits_in_transformers(expected):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import polysketch.integrations.huggingface  # noqa: F401 - makes transformers know the model

    wanted = expected["logits"]
    ids = AutoTokenizer.from_pretrained("exported")(wanted["prompt"], return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == wanted["ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained("exported")(ids).logits[0, -1]
    assert relative_error(logits, torch.tensor(wanted["last"])) < ROUNDING


def test_an_export_becomes_a_run_again(expected):
    assert main(["import", "exported", "imported"]) == 0
    wanted = expected["generated"]
    model, _ = load_model("imported")
    tokens = generate(model, [wanted["prompt"]], max_new_tokens=len(wanted["tokens"]), temperature=0.0).tokens[0]
    assert list(tokens) == wanted["tokens"]


def test_a_saved_state_is_gone_on_with(expected):
    inputs = safetensors.torch.load_file("continued.safetensors")
    output = inputs.pop("output")
    state = ops.LinearAttentionState.load("state.safetensors")
    assert relative_error(state_call(inputs, 10, 20, state=state).output, output) < ROUNDING


def test_every_mechanism_takes_its_weights_and_gives_the_same(expected):
    tensors = safetensors.torch.load_file("mechanisms.safetensors")
    inputs = {name: tensors[f"input/{name}"] for name in ("query", "key", "value", "hidden")}
    for built in expected["mechanisms"]:
        name = built["name"]
        mechanism = attention.build(name, num_heads=2, head_dim=4, **built["options"]).eval()
        prefix = f"{name}/weight/"
        mechanism.load_state_dict({key[len(prefix) :]: x for key, x in tensors.items() if key.startswith(prefix)})
        with torch.no_grad():
            output = mechanism(**inputs, causal=built["causal"])
        assert relative_error(output, tensors[f"{name}/output"]) < ROUNDING, name


def test_the_record_of_a_study_is_taken(expected, capsys):
    before = {path: path.read_bytes() for path in Path("studies").rglob("softmax-*.json")}
    assert before
    assert main(["study", *expected["study"].split()]) == 0
    assert capsys.readouterr().out.count("there is a record") == len(before)
    assert {path: path.read_bytes() for path in before} == before


def test_a_task_is_trained_on(expected):
    flags = "--layers 1 --attention softmax --batch-size 4 --steps 1 --eval-every 0 --no-tensorboard --device cpu"
    command = f"train --data task --preset {expected['preset']['name']} --out new {flags}"
    assert main(command.split()) == 0
