"""`polysketch evaluate --tasks`: figures of lm_eval on local files, for runs and for folders of transformers."""

import json
import os
from pathlib import Path

import pytest
import torch

from integrations.lm_eval.conftest import MAKERS, PHYSICS, write_documents
from polysketch.cli import main
from polysketch.data import PreparedData


@pytest.fixture(autouse=True)
def _run(stand_in_run, monkeypatch):
    stand_in_run()
    monkeypatch.delenv("POLYSKETCH_DATA", raising=False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory) -> Path:
    """Six documents of two tasks, one of BIG-bench, questions of one's own, and a file of them that is none."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in ("hellaswag", "piqa"):
        write_documents(folder / f"{name}.jsonl", [MAKERS[name](index) for index in range(6)])
    (folder / "physics.json").write_text(json.dumps(PHYSICS))
    question = {"question": "Who sails?", "choices": ["a ship", "a hat"]}
    write_documents(folder / "facts.jsonl", [question | {"answer": 0}] * 4)
    write_documents(folder / "bad.jsonl", [question | {"answer": 2}])
    return folder


def figures(capsys: pytest.CaptureFixture[str]) -> dict:
    """The last line, as JSON."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_task_is_scored_at_every_number_of_shots(capsys, tmp_path, task_folder):
    """The table, the last line and the file hold the same figures; the file versions and settings besides."""
    arguments = ["--tasks", "hellaswag,piqa,physics", "--task-data", str(task_folder), "--shots", "0,2", "--json"]
    assert main(["evaluate", "run", *arguments, "--limit", "4", "--out", str(tmp_path / "out.json")]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    keys = [(each["task"], each["shots"], each["metric"]) for each in found["tasks"]]
    tasks = ("hellaswag", "piqa", "physics")
    assert keys == [(task, shots, metric) for shots in (0, 2) for task in tasks for metric in ("acc", "acc_norm")]
    assert {each["num_documents"] for each in found["tasks"]} == {4}
    assert [each["chance"] for each in found["tasks"][:6:2]] == [0.25, 0.5, 0.25]
    for each in found["tasks"]:
        assert any(each["task"] in line and f"{each['value']:.4f}" in line for line in table)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["figures"] == found
    assert written["settings"]["shots"] == "0,2"
    assert {"torch", "lm_eval", "polysketch"} <= written["versions"].keys()


def test_questions_of_ones_own_are_scored(capsys, task_folder):
    """By the name of their file, and by its path."""
    for name, folder in (("facts", ["--task-data", str(task_folder)]), (str(task_folder / "facts.jsonl"), [])):
        assert main(["evaluate", "run", "--tasks", name, *folder, "--json"]) == 0
        found = figures(capsys)["tasks"]
        assert [(each["task"], each["metric"], each["chance"]) for each in found] == [
            ("facts", "acc", 0.5),
            ("facts", "acc_norm", 0.5),
        ]


def test_texts_of_ruler_are_made_at_each_length_and_read_whole(capsys):
    """Without a file; the model reads as much as the longest needs, unless another limit is given."""
    arguments = ["--tasks", "ruler_fwe", "--lengths", "1024,2304", "--limit", "1", "--json"]
    assert main(["evaluate", "run", *arguments]) == 0
    found = figures(capsys)
    assert [(each["task"], each["metric"], each["num_documents"]) for each in found["tasks"]] == [
        ("ruler_fwe", "1024", 1),
        ("ruler_fwe", "2304", 1),
    ]
    assert 2048 < found["max_length"] < 2304 + 60
    assert found["sources"] == {"ruler_fwe": {"documents": "made up", "examples": ""}}
    assert main(["evaluate", "run", *arguments, "--max-length", "256"]) == 0
    assert "ruler_fwe: questions of up to" in capsys.readouterr().out


def test_files_are_found_in_the_folder_of_outside_data(capsys, monkeypatch, tmp_path, task_folder):
    """In eval, where no folder is given."""
    (tmp_path / "eval").symlink_to(task_folder)
    monkeypatch.setenv("POLYSKETCH_DATA", str(tmp_path))
    assert main(["evaluate", "run", "--tasks", "piqa", "--limit", "2", "--json"]) == 0
    assert figures(capsys)["sources"]["piqa"]["documents"] == str(tmp_path / "eval" / "piqa.jsonl")


def test_an_exported_model_has_the_figures_of_its_run(capsys, tmp_path, task_folder, small_model, data_folder):
    """A folder of transformers with one of our models, on tasks and on text."""
    from polysketch.integrations.huggingface import PolysketchForCausalLM
    from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

    PolysketchForCausalLM.from_transformer(small_model, context_length=64).save_pretrained(tmp_path)
    to_fast_tokenizer(PreparedData.open(data_folder).tokenizer).save_pretrained(tmp_path)
    for arguments in (
        ["--tasks", "piqa", "--task-data", str(task_folder), "--shots", "1"],
        ["--data", str(data_folder), "--max-tokens", "300"],
        ["--contexts", "32,64", "--data", str(data_folder), "--max-tokens", "300"],
    ):
        found = []
        for model in ("run", str(tmp_path)):
            assert main(["evaluate", model, *arguments, "--json"]) == 0
            found.append({name: value for name, value in figures(capsys).items() if name not in ("run", "step")})
        assert found[0] == found[1]


def test_any_other_model_of_transformers_can_be_scored(capsys, tmp_path, task_folder, data_folder):
    """By lm_eval's own class; on text it needs to be told which."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path)
    to_fast_tokenizer(PreparedData.open(data_folder).tokenizer).save_pretrained(tmp_path)
    assert main(["evaluate", str(tmp_path), "--tasks", "piqa", "--task-data", str(task_folder), "--json"]) == 0
    found = figures(capsys)
    assert (found["max_length"], len(found["tasks"])) == (64, 2)
    assert main(["evaluate", str(tmp_path), "--data", str(data_folder), "--max-tokens", "200", "--json"]) == 0
    assert figures(capsys)["context_length"] == 64
    for arguments in (["--needle", "--lengths", "150", "--trials", "2"], ["--recall", "--pairs", "2", "--gaps", "0"]):
        assert main(["evaluate", str(tmp_path), *arguments, "--data", str(data_folder), "--json"]) == 0
        assert len(figures(capsys)["accuracy"]) == 1
    assert main(["evaluate", str(tmp_path)]) == 1
    assert "expected --data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "hellaswog"], "expected a task of hellaswag"),
        (["--tasks", "bad"], "line 1 of {folder}/bad.jsonl: expected a number from 0 to 1 as `answer`"),
        (["--tasks", "no/such/facts.jsonl"], "expected the file of a task, found none called no/such"),
        (["--tasks", "winogrande"], "expected a file winogrande_dev"),
        (["--tasks", ","], "expected names"),
        (["--tasks", "ruler_cwe"], "expected ruler_vt or ruler_fwe of RULER's tasks, found 'ruler_cwe'"),
        (["--tasks", "ruler_fwe", "--lengths", "150"], "ruler_fwe: expected longer --lengths for this tokenizer"),
        (["--tasks", "ruler_vt", "--lengths", "long"], "--lengths: expected numbers with commas between, found 'long'"),
        (["--tasks", "piqa", "--shots", "five"], "--shots: expected numbers with commas between, found 'five'"),
        (["--tasks", "piqa", "--shots", "-1"], "expected numbers of at least 0"),
        (["--tasks", "piqa", "--limit", "0"], "a --limit of at least 1"),
        (["--tasks", "piqa", "--plot", "a.png"], "expected no --plot"),
        (["--tasks", "piqa", "--needle"], "found --tasks and --needle"),
        (["--tasks", "piqa", "--without-prefix"], "no layer has a sketched prefix"),
        (["--tasks", "piqa", "--out", "no/such/folder.json"], "found none"),
    ],
)
def test_bad_input_gives_one_line_and_status_1(capsys, task_folder, arguments, message):
    """And no traceback."""
    assert main(["evaluate", "run", *arguments, "--task-data", str(task_folder)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("polysketch: ")]
    assert message.format(folder=task_folder) in line


def test_without_any_folder_the_message_says_how_to_give_one(capsys):
    """Neither flag nor variable."""
    assert main(["evaluate", "run", "--tasks", "piqa"]) == 1
    assert "none was given, nor POLYSKETCH_DATA" in capsys.readouterr().err
    assert main(["evaluate", "run", "--tasks", "piqa", "--task-data", "nowhere"]) == 1
    assert "--task-data: expected a folder, found none at nowhere" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.data
def test_tasks_in_circulation_are_scored_offline(capsys, monkeypatch, outside_data):
    """All that there are, a few questions of each."""
    monkeypatch.setenv("POLYSKETCH_DATA", str(outside_data))
    tasks = "hellaswag,piqa,lambada,arc,winogrande,openbookqa"
    assert main(["evaluate", "run", "--tasks", tasks, "--limit", "3", "--max-length", "256", "--json"]) == 0
    assert len({each["task"] for each in figures(capsys)["tasks"]}) == 7
