"""`polysketch verify`: what is whole is called whole, and one changed bit anywhere is told with its file."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from polysketch.cli import main
from polysketch.integrations.huggingface.export import export_run
from polysketch.progress import Progress
from polysketch.storage.sums import SUMS
from polysketch.tasks import reversal
from polysketch.tasks.folder import write_task
from polysketch.tasks.stored import Classification, ClassifiedRows
from polysketch.training import verification

CARRIES_NO_SUM = {"lock", "loss.png", "tensorboard"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, data_folder) -> Path:
    """Prepared text, a task, a run of two checkpoints, and its export."""
    root = tmp_path_factory.mktemp("verified")
    shutil.copytree(data_folder, root / "prepared")
    write_task(reversal.Reversal(length=4), root / "task")
    flags = "--preset tiny --layers 1 --context 16 --batch-size 1 --steps 2 --save-every 1 --eval-every 0"
    assert main(["train", "--data", str(root / "prepared"), *flags.split(), "--out", str(root / "run")]) == 0
    export_run(root / "run", root / "export")
    return root


KINDS = {"prepared": "prepared text", "task": "a task", "run": "a training run", "export": "an exported model"}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_whole_is_called_so(name, folders, capsys):
    assert main(["verify", str(folders / name)]) == 0
    found = capsys.readouterr()
    assert f"{name}: {KINDS[name]}, " in found.out
    assert ": whole" in found.out
    assert found.err == ""


@pytest.mark.parametrize("name", KINDS)
def test_one_bit_of_any_file_is_found(name, folders, tmp_path):
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    files = [path for path in folder.rglob("*") if path.is_file() and not CARRIES_NO_SUM & {*path.parts}]
    assert len(files) >= (1 if name == "task" else 4)
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 2}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
            problems = verification.verify(folder).problems
            path.write_bytes(content)
            assert problems, f"{path.relative_to(folder)}, byte {place}"
    assert verification.verify(folder).problems == ()


def test_every_damaged_file_is_named_and_the_rest_is_looked_at(folders, tmp_path, capsys):
    shutil.copytree(folders / "run", tmp_path / "run")
    first, last = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (first / "model.safetensors").write_bytes(b"short")
    (last / "random.safetensors").unlink()
    assert main(["verify", str(tmp_path / "run"), str(folders / "export"), "--json"]) == 1
    found = capsys.readouterr()
    record = json.loads(found.out.splitlines()[-1])
    assert [len(one["problems"]) for one in record.values()] == [2, 0]
    assert "2 damaged" in found.out
    assert "export: an exported model" in found.out
    assert f"{first.name}/model.safetensors" in found.err
    assert f"{last.name}/random.safetensors" in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("name", "damaged"),
    [("prepared", ("train.bin", "test.bin")), ("task-of-rows", ("train.ids", "test.ids"))],
)
def test_every_damaged_file_of_text_and_of_rows_is_named(name, damaged, folders, tmp_path):
    folder = tmp_path / "damaged"
    if name == "prepared":
        shutil.copytree(folders / name, folder)
    else:
        rows = ClassifiedRows.of([np.arange(1, 4)] * 3, [0, 1, 0])
        write_task(Classification({"train": rows, "test": rows}, 9, ("a", "b")), folder)
    files = [path for path in sorted(folder.iterdir()) if path.name.startswith(damaged)]
    assert len(files) == len(damaged)
    files[0].write_bytes(files[0].read_bytes()[:-2])
    for path in files[1:]:
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 2]) + content[1:])
    problems = " ".join(verification.verify(folder).problems)
    assert all(str(path) in problems for path in files)


def test_terabytes_of_a_hole_in_a_task_that_does_not_open_are_not_read(tmp_path):
    rows = ClassifiedRows.of([np.arange(1, 4)] * 3, [0, 1, 0])
    write_task(Classification({"train": rows}, 9, ("a", "b")), tmp_path / "task")
    os.truncate(tmp_path / "task" / "train.ids.bin", 2**40)
    (problem,) = verification.verify(tmp_path / "task").problems
    assert "files of train that belong together" in problem


def test_a_checkpoint_of_another_run_is_damage(folders, tmp_path):
    shutil.copytree(folders / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    flags = "--preset tiny --layers 1 --context 16 --batch-size 1 --steps 2 --seed 5 --eval-every 0"
    assert main(["train", "--data", str(folders / "prepared"), *flags.split(), "--out", str(tmp_path / "other")]) == 0
    shutil.copy(tmp_path / "other" / "config.json", config)
    assert any("run" in problem for problem in verification.verify(tmp_path / "run").problems)


@pytest.mark.parametrize("line", ["", "zz  model.safetensors", f"{'0' * 64}  ../outside", f"{'0' * 64}  /etc/hostname"])
def test_sums_of_another_form_are_damage_and_nothing_outside_is_read(line, folders, tmp_path):
    shutil.copytree(folders / "export", tmp_path / "export")
    path = tmp_path / "export" / SUMS
    path.write_text(f"{path.read_text()}{line}\n")
    (problem,) = verification.verify(tmp_path / "export").problems
    assert "expected a sha256, two spaces and a file of the folder" in problem


def test_a_pipe_is_not_waited_for_and_no_manifest_leads_out_of_its_folder(folders, tmp_path):
    shutil.copytree(folders / "export", tmp_path / "export")
    (tmp_path / "export" / "config.json").unlink()
    os.mkfifo(tmp_path / "export" / "config.json")
    (problem,) = verification.verify(tmp_path / "export").problems
    assert "config.json is missing" in problem
    shutil.copytree(folders / "run", tmp_path / "run")
    manifest = min((tmp_path / "run" / "checkpoints").iterdir()) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"random.safetensors"', '"../../config.json"'))
    assert any(
        "expected a list of files in the folder" in one for one in verification.verify(tmp_path / "run").problems
    )


def test_a_large_folder_shows_how_much_is_read(folders, monkeypatch, capsys):
    monkeypatch.setattr(Progress.__init__, "__kwdefaults__", {**Progress.__init__.__kwdefaults__, "quiet_seconds": 0.0})
    assert main(["verify", str(folders / "prepared")]) == 0
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"verifying  \d+\.\d %  \S+ parts/s  \d+:\d\d left", told[0])


def test_bad_input_is_one_line(tmp_path, capsys):
    assert main(["verify"]) == 1
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "at least one folder" in lines[0]
    assert "expected a folder" in lines[1]
    assert "expected prepared text" in lines[2]


def test_a_model_that_others_wrote_has_no_sums(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["verify", str(tmp_path)]) == 1
    assert "expected sums to compare with, found a model of transformers without SHA256SUMS" in capsys.readouterr().err
