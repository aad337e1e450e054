"""The GPU script, tried with tiny sizes on a CPU: it runs to its end, and it sees what is broken."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.budget import Budget
from benchmarks.gpu import apart, cases, generated_tokens, kernels, language_model, targets
from benchmarks.journal import Journal

from benchmarks import checking, gpu_check, sanitizer
from polysketch.attention import PolynomialAttention
from polysketch.benchmarking.timing import Clock

CPU = torch.device("cpu")


def run(verb: str, out: Path, *options: str) -> tuple[int, list[dict]]:
    """Exit status and records of the script on this CPU."""
    status = gpu_check.main([verb, "--device", "cpu", "--quick", "--out", str(out), *options])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


IMPORT_ALONE = """
import importlib.abc, re, sys
from importlib import metadata
needed = {"torch", "numpy"}

class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in extra:
            raise ModuleNotFoundError(name)

named = {re.match(r"[\\w.-]+", one)[0].lower() for one in metadata.requires("polysketch")}
extra = {module for module, owners in metadata.packages_distributions().items() for owner in owners
         if owner.lower() in named - needed}
assert {"tyro", "safetensors"} <= extra, extra
sys.meta_path.insert(0, Bare())
import benchmarks.gpu_check
"""


@pytest.mark.full
def test_the_script_needs_torch_and_numpy_alone():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full  # the checks themselves run in tests/device
@pytest.mark.parametrize(("every", "checks"), [(82, 6), (checking._QUICK, 30)], ids=["few", "quick"])
def test_every_check_passes_and_is_recorded(every, checks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checking, "_QUICK", every)
    status, records = run("check", tmp_path / "gpu.jsonl")
    kinds = Counter(record["kind"] for record in records)
    assert status == 0
    assert kinds["environment"] == kinds["sanitizer"] == 1
    assert kinds["check"] > checks
    tests = [one for one in records if one["kind"] in {"check", "skipped"}]
    assert all(one["name"].startswith("device/") for one in tests)
    assert all(one["reason"] if one["kind"] == "skipped" else one["seconds"] >= 0 for one in tests)
    shown = capsys.readouterr().out
    assert f"{kinds['check']} of {kinds['check']} tests passed" in shown
    assert re.search(r"float(16|32) +(native|chunked|blockwise) +\d+ +\d\.\d\d", shown)


@pytest.mark.full
def test_tests_are_picked_by_an_expression(tmp_path):
    status, records = run("check", tmp_path / "gpu.jsonl", "--match", "learned_sketch and float32")
    names = [one["name"] for one in records if one["kind"] in {"check", "skipped"}]
    assert status == 0
    assert names
    assert all("learned_sketch" in name and "float32" in name for name in names)


TESTS = """
import os, time
import pytest

@pytest.mark.device
@pytest.mark.parametrize("number", range(5))
def test_cpu(number, record_property):
    record_property("figure", number)
    if number == 2:
        {happens}
"""


def checked(folder: Path, monkeypatch, happens: str, seconds: float = 60.0, grace: float = 20.0) -> Journal:
    """What is recorded of five tests, where something happens in the third."""
    (folder / "test_five.py").write_text(TESTS.format(happens=happens))
    monkeypatch.setattr(checking, "FOLDERS", (str(folder),))
    monkeypatch.setattr(checking, "_GRACE", grace)
    journal = Journal(folder / "gpu.jsonl")
    checking.run_tests("cpu", Budget(seconds), journal, processes=1, quick=False)
    return journal


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        ("assert number == 3, 'not three'", "AssertionError: not three"),
        pytest.param("os._exit(3)", "crashed while running", marks=pytest.mark.full),
        pytest.param("raise RuntimeError('an illegal access')", "an illegal access", marks=pytest.mark.full),
        pytest.param("time.sleep(60)", "Timeout", marks=pytest.mark.full),
    ],
)
def test_what_fails_crashes_or_hangs_is_named_and_the_rest_goes_on(happens, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_LONGEST_TEST", 3)
    journal = checked(tmp_path, monkeypatch, happens)
    found = {one["name"][-2]: one for one in journal.of("check")}
    assert {number for number, one in found.items() if one["passed"]} == set("0134")
    assert found["4"]["figure"] == 4
    assert reason in found["2"]["error"]
    assert not journal.of("crashed")


@pytest.mark.full
def test_nothing_goes_on_for_long_beyond_its_section(tmp_path, monkeypatch):
    started = time.monotonic()
    journal = checked(tmp_path, monkeypatch, "time.sleep(600)", seconds=8.0, grace=1.0)
    assert time.monotonic() - started < 40
    assert "took too long" in journal.of("crashed")[0]["error"]


@pytest.mark.full
def test_a_module_that_cannot_be_imported_is_no_success(tmp_path, monkeypatch):
    journal = checked(tmp_path, monkeypatch, "pass\n\nimport nothing_by_that_name")
    assert any("nothing_by_that_name" in one["error"] for one in journal.of("crashed"))


def test_without_pytest_the_checks_are_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(checking, "_installed", lambda name: False)
    assert gpu_check.main(["check", "--device", "cpu"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "gpu_check check runs the tests: expected pytest, which is not installed"
    ]


def test_plugins_that_are_not_installed_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(checking, "_installed", lambda name: name == "pytest")
    command = checking._command("cuda", 4, quick=False, match=None)
    assert "-n" not in command
    assert not any("timeout" in part for part in command)


def crash(*_, **__):
    raise RuntimeError("deliberately broken")


@pytest.mark.full
def test_everything_that_is_timed_is_recorded_and_drawn(tmp_path, capsys):
    status, records = run("bench", tmp_path / "gpu.jsonl")
    kinds = Counter(record["kind"] for record in records)
    assert status == 0
    assert kinds["rates"] == 1
    assert kinds["train"] == 2 * len(language_model.MODELS)
    assert kinds["decode"] == 16
    timed = [record for record in records if record["kind"] == "time"]
    answered = [one for one in records if "series" in one and one["kind"] in {"time", "failed", "skipped"}]
    assert len(answered) == len(kernels.cases(quick=True))
    assert {one["series"] for one in timed} >= {"sdpa flash", "features r=32", "learned r=64", "polynomial degree=4"}
    assert {one["direction"] for one in timed} == {"forward", "forward+backward"}
    assert all(one["tflops"] > 0 and one["matrix_share"] > 0 and one["bandwidth_share"] > 0 for one in timed)
    assert (tmp_path / "gpu.png").stat().st_size > 1_000
    assert "rate, r=32, forward+backward at 32k" in capsys.readouterr().out


def test_the_sanitizer_runs_where_it_is_and_says_so_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    assert sanitizer.finish(sanitizer.start(), 1.0)["passed"] is None
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setattr(sanitizer, "find_tool", lambda: str(tool))
    for status, said, passed in (
        (0, "ran: linear", True),
        (99, "ran: linear", False),
        (99, "========= Invalid __global__ read of size 2", False),
        (1, "ran: linear", None),
        (0, "", None),
        (99, "", None),
        (99, "========= Error: Device not supported", None),
    ):
        tool.write_text(f"#!/bin/sh\necho ========= COMPUTE-SANITIZER\necho '{said}'\nexit {status}\n")
        tool.chmod(0o755)
        found = sanitizer.finish(sanitizer.start(), 30.0)
        assert found["passed"] is passed
        assert found["reports"][0] == "========= COMPUTE-SANITIZER"
        assert passed is not None or found["reason"]


@pytest.mark.full
def test_a_sanitizer_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n(sleep 2; touch {tmp_path}/alive) &\nsleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "find_tool", lambda: str(tool))
    assert sanitizer.finish(sanitizer.start(), 1.0)["reason"] == "not done in time"
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_targets_are_computed_from_the_records(tmp_path):
    journal = Journal(tmp_path / "gpu.jsonl")
    for length in (2**11, 2**12, 2**15, 2**17):
        common = {"direction": "forward+backward", "length": length, "batch": 2**17 // length}
        journal.write("time", series="sdpa flash", seconds=length / 2**12, **common)
        journal.write("time", series="sdpa cudnn", seconds=length / 2**11.5, **common)
        journal.write("time", series="features r=32", seconds=2**0.5, tflops=150.0, **common)
    journal.write("train", model="softmax", length=2**15, seconds=4.0)
    journal.write("train", model="random r=32", length=2**15, seconds=1.0)
    found = targets.figures(journal)
    rate, at_32k, at_128k, even, training, learned, decoded = found
    assert found[rate].reached is False
    assert found[at_32k].value == pytest.approx(8 / 2**0.5)
    assert found[at_128k].value == pytest.approx(32 / 2**0.5)
    assert found[even].value == pytest.approx(2**12.5)
    assert found[training].reached is True
    assert [name for name, figure in found.items() if figure is None] == [learned, decoded]


def test_a_filled_state_decodes_at_its_position():
    for name in ("softmax", "random r=32"):
        model = language_model.build_model(name, CPU, quick=True).eval()
        state = model.init_state(2)
        generated_tokens.fill(state, model, 40, room=3)
        logits, state = model.extend(torch.zeros(2, 1, dtype=torch.int64), state)
        assert state.position.tolist() == [41, 41]
        assert logits.isfinite().all()


@pytest.mark.full
def test_a_case_that_fails_ends_only_its_series(tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("deliberately too large")

    monkeypatch.setattr(PolynomialAttention, "forward", too_large)
    status, records = run("bench", tmp_path / "gpu.jsonl", "--only", "attention")
    failed = [record for record in records if record["kind"] == "failed" and record["series"].startswith("polynomial")]
    skipped = [record for record in records if record["kind"] == "skipped"]
    assert status == 0
    assert failed
    assert all(record["out_of_memory"] for record in failed)
    assert any(record["series"].startswith("polynomial") for record in skipped)
    assert any(record["series"].startswith("learned") for record in records if record["kind"] == "time")


@pytest.mark.parametrize(("verb", "expected"), [("check", 1), ("bench", 0)])
def test_what_does_not_fit_the_budget_is_named_and_no_check_is_no_success(verb, expected, tmp_path, monkeypatch):
    (tmp_path / "test_five.py").write_text(TESTS.format(happens="pass"))
    monkeypatch.setattr(checking, "FOLDERS", (str(tmp_path),))
    status, records = run(verb, tmp_path / "gpu.jsonl", "--budget-seconds", "0")
    assert status == expected
    assert not any(record["kind"] in ("check", "time", "train", "decode") for record in records)
    reasons = {record["reason"] for record in records if record["kind"] == "skipped"}
    assert reasons == {"no time left in this section"}


@pytest.mark.full
def test_a_part_that_breaks_down_is_reported_at_the_end_and_is_no_success(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("deliberately broken")

    monkeypatch.setattr(gpu_check, "matrix_rate", broken)
    status, records = run("bench", tmp_path / "gpu.jsonl", "--only", "decoding")
    assert status == 1
    assert [record["part"] for record in records if record["kind"] == "crashed"] == ["rates"]
    assert any(record["kind"] == "decode" for record in records)
    assert "CRASHED: rates" in capsys.readouterr().out


@pytest.mark.full
def test_a_table_that_breaks_down_does_not_take_the_picture_along(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "print_bench", crash)
    status, records = run("bench", tmp_path / "gpu.jsonl", "--only", "decoding")
    assert status == 1
    assert [record["part"] for record in records if record["kind"] == "crashed"] == ["table"]
    assert (tmp_path / "gpu.png").exists()


@pytest.mark.full
def test_sections_in_processes_of_their_own_write_the_same_file(tmp_path):
    status, records = run("bench", tmp_path / "gpu.jsonl", "--apart", "--only", "decoding")
    assert status == 0
    assert Counter(record["kind"] for record in records)["decode"] == 16


DYING = """
import sys
from pathlib import Path
from benchmarks.journal import Journal
journal = Journal(Path(sys.argv[1]), keep=True)
for length in range(4):
    if not journal.has(length=length):
        journal.write("begun", section="training", length=length)
        {death}
        journal.write("train", length=length)
"""


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("if length == 1: sys.exit('illegal')", "illegal"),
        pytest.param("if length == 1: import time; time.sleep(60)", "nothing", marks=pytest.mark.full),
    ],
)
def test_a_section_whose_process_dies_or_hangs_loses_one_case(death, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "_LONGEST_SILENCE", 5.0)
    journal = Journal(tmp_path / "gpu.jsonl")
    command = [sys.executable, "-c", DYING.format(death=death), str(journal.path)]
    apart.run_apart("training", lambda seconds: command, Budget(60), journal)
    assert [one["length"] for one in journal.of("train")] == [0, 2, 3]
    assert [one["length"] for one in journal.of("failed")] == [1]
    assert reason in journal.of("crashed")[0]["error"]


def test_a_line_cut_short_is_dropped(tmp_path):
    journal = Journal(tmp_path / "gpu.jsonl")
    journal.write("train", length=1)
    with journal.path.open("a") as file:
        file.write('{"kind": "tr')
    again = Journal(journal.path, keep=True)
    again.write("train", length=2)
    assert [one["length"] for one in Journal(journal.path, keep=True).of("train")] == [1, 2]


def test_without_a_gpu_the_default_device_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for verb in ("check", "bench"):
        assert gpu_check.main([verb]) == 2
        assert "--device cpu" in capsys.readouterr().out


def test_decoding_is_charged_its_share_of_the_step_that_fills_a_chunk(monkeypatch, tmp_path):
    starts = []

    def seconds(step, rows, count, device):
        starts.append(int(STATES[-1].position[0]))
        return [1.0, 17.0, 1.0] if starts[-1] % 16 != 8 else [1.0] * count

    def stepper(model, rows):
        found = INTACT_STEPPER(model, rows)
        STATES.append(found[1])
        return found

    monkeypatch.setattr(generated_tokens, "_step_seconds", seconds)
    monkeypatch.setattr(generated_tokens, "_stepper", stepper)
    labels = {"model": "random r=32", "batch": 1, "position": 64}
    bench = cases.Bench(Clock(CPU), Budget(60), Journal(tmp_path / "gpu.jsonl"), quick=True)
    found = generated_tokens._decode(bench, labels)
    assert starts == [72, 76, 76, 76]
    assert found["seconds"] == 2.0
    assert found["filling_step_seconds"] == 17.0


STATES: list = []
INTACT_STEPPER = generated_tokens._stepper


def test_a_capture_that_fails_leaves_a_plain_step_and_says_why(monkeypatch):
    monkeypatch.setattr(generated_tokens, "why_no_graph", lambda model, state: None)
    monkeypatch.setattr(generated_tokens, "CapturedStep", crash)
    model = language_model.build_model("random r=32", CPU, quick=True).eval()
    step, state, reason = generated_tokens._stepper(model, 2)
    with torch.inference_mode():
        assert step(torch.zeros(2, dtype=torch.int64)).isfinite().all()
    assert state.position.tolist() == [1, 1]
    assert "deliberately broken" in reason


def test_a_device_that_computes_no_more_ends_the_process_of_its_section(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", crash)
    with pytest.raises(cases.DeviceLost, match="deliberately broken"):
        cases.release_memory(torch.device("cuda"))
