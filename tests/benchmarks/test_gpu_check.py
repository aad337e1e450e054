"""The GPU script, tried with tiny sizes on a CPU: it runs to its end, and it sees what is broken."""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.budget import Budget
from benchmarks.checks import captured, linear, mechanisms, pool, ratios, sanitizer
from benchmarks.checks.base import run_check
from benchmarks.checks.tasks import Task, all_tasks
from benchmarks.gpu import apart, cases, decoding, language_model, targets
from benchmarks.gpu import attention as timed_attention
from benchmarks.journal import Journal

from benchmarks import gpu_check
from generation.recording import recorded, split_positions
from polysketch import attention as library
from polysketch.benchmarking.timing import Clock, Rates
from polysketch.generation import captured as library_captured
from polysketch.generation.captured import CapturedStep
from polysketch.models import TransformerLM
from polysketch.ops.linear import api

CPU = torch.device("cpu")


def run(verb: str, out: Path, *options: str) -> tuple[int, list[dict]]:
    """Exit status and records of the script on this CPU."""
    status = gpu_check.main([verb, "--device", "cpu", "--quick", "--out", str(out), *options])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


def some_tasks(*names: str) -> list[Task]:
    return [task for task in all_tasks(quick=True) if task.name.startswith(names)]


def test_every_check_passes_and_is_recorded(tmp_path, capsys):
    status, records = run("check", tmp_path / "gpu.jsonl")
    kinds = Counter(record["kind"] for record in records)
    assert status == 0
    assert kinds["environment"] == kinds["sanitizer"] == 1
    assert kinds["check"] > 300
    assert kinds["ratio"] > 10
    shown = capsys.readouterr().out
    assert f"{kinds['check']} of {kinds['check']} checks passed" in shown
    assert f"{kinds['ratio']} of {kinds['ratio']} comparisons with plain formulas passed" in shown


def test_everything_that_is_timed_is_recorded_and_drawn(tmp_path, capsys):
    status, records = run("bench", tmp_path / "gpu.jsonl")
    kinds = Counter(record["kind"] for record in records)
    assert status == 0
    assert kinds["rates"] == 1
    assert kinds["train"] == 2 * len(language_model.MODELS)
    assert kinds["decode"] == 16
    assert kinds["floor"] == len(timed_attention.cases(quick=True))
    timed = [record for record in records if record["kind"] == "time"]
    assert {one["series"] for one in timed} >= {"sdpa flash", "features r=32", "learned r=64", "polynomial degree=4"}
    assert {one["direction"] for one in timed} == {"forward", "forward+backward"}
    assert all(one["tflops"] > 0 and one["matrix_share"] > 0 and one["bandwidth_share"] > 0 for one in timed)
    assert (tmp_path / "gpu.png").stat().st_size > 1_000
    assert "rate, r=32, forward+backward at 32k" in capsys.readouterr().out


def wrong_value(result, *_):
    return result._replace(output=result.output * 1.05)


def one_element_unwritten(result, *_):
    output = result.output.clone()
    output[0, 0, 0, 0] = torch.nan
    return result._replace(output=output)


def wrong_gradient(result, query, *_):
    extra = query.to(result.output.dtype).sum(-1, keepdim=True)
    return result._replace(output=result.output + 0.2 * (extra - extra.detach()))


def crash(*_):
    raise RuntimeError("deliberately broken")


@pytest.mark.parametrize("change", [wrong_value, one_element_unwritten, wrong_gradient, crash])
def test_a_broken_backend_is_detected_and_the_rest_goes_on(change, tmp_path, monkeypatch):
    intact = api.BACKENDS["chunked"]
    broken = lambda *tensors, **options: change(intact(*tensors, **options), *tensors)  # noqa: E731
    monkeypatch.setitem(api.BACKENDS, "chunked", broken)
    some = [*some_tasks("linear: power")[::9], *some_tasks("linear power 2, local")]
    monkeypatch.setattr(gpu_check, "all_tasks", lambda *, quick: some)
    status, records = run("check", tmp_path / "gpu.jsonl")
    checks = [one for one in records if one["kind"] == "check" or one.get("backend") == "chunked"]
    assert status == 1
    assert len(checks) == len(some)
    assert not any(check["passed"] for check in checks)


def test_a_result_that_is_not_the_same_twice_is_no_success(tmp_path, monkeypatch):
    intact, turn = api.BACKENDS["chunked"], iter(range(100))

    def moving(*tensors, **options):
        result = intact(*tensors, **options)
        return result._replace(output=result.output * (1 + 1e-7 * (next(turn) % 2)))

    monkeypatch.setitem(api.BACKENDS, "chunked", moving)
    monkeypatch.setattr(gpu_check, "all_tasks", lambda *, quick: some_tasks("linear power 2, local"))
    status, records = run("check", tmp_path / "gpu.jsonl")
    found = [one for one in records if one.get("backend") == "chunked" and one["dtype"] == "float32"]
    assert status == 1
    assert found
    assert all("output" in one["not_deterministic"] for one in found)


def test_plain_formulas_in_float64_are_the_references():
    for one in ratios.ratios(quick=True):
        inputs = one.inputs()
        expected = {"linear": "reference", "polynomial": "reference", "sketch": "chunked"}[one.name.partition(" ")[0]]
        found = one.formula(**inputs)
        torch.testing.assert_close(found, one.backends[expected](**inputs), rtol=1e-9, atol=1e-12)


def test_processes_run_what_they_have_time_for_and_name_the_rest(tmp_path):
    status, records = run("check", tmp_path / "gpu.jsonl", "--processes", "1", "--budget-seconds", "11")
    done = {(record["kind"], record["name"]) for record in records if record["kind"] in ("check", "ratio")}
    left_out = [record["name"] for record in records if record["kind"] == "skipped"]
    assert done
    assert status == (0 if any(kind == "check" for kind, _ in done) else 1)
    assert 0 < len(left_out) < len(all_tasks(quick=True))


def pooled(monkeypatch, death: str, report=None, seconds: float = 60.0) -> tuple[dict[str, list], list]:
    """What four tasks of one process answer, where the process does `death` at some task; and what is left out."""
    tasks = [Task("check", str(number), lambda device: []) for number in range(5)]
    script = (
        "import sys, os, time\n"
        "for line in sys.stdin:\n"
        f"    {death}\n"
        "    print('records: [{\"passed\": true}]', flush=True)\n"
    )
    monkeypatch.setattr(pool._Worker, "command", lambda self: [sys.executable, "-c", script])
    found: dict[str, list] = {}
    report = report or (lambda task, records: found.update({task.name: records}))
    left = pool.run_in_processes(tasks, "cpu", 1, Budget(seconds).section(1.0), report, quick=True)
    return found, [(task.name, reason) for task, reason in left]


def test_a_process_that_crashes_fails_its_task_alone_and_says_why(monkeypatch):
    found, left = pooled(monkeypatch, "if int(line) == 2: sys.exit('illegal access')")
    assert left == []
    assert [found[str(number)][0]["passed"] for number in range(5)] == [True, True, False, True, True]
    assert "crashed with status 1: illegal access" in found["2"][0]["error"]


def test_a_process_that_hangs_is_told_from_one_that_crashes(monkeypatch):
    monkeypatch.setattr(pool, "_LONGEST_TASK", 2.0)
    found, left = pooled(monkeypatch, "if int(line) == 2: time.sleep(60)")
    assert left == []
    assert "ended after 2 s" in found["2"][0]["error"]
    assert found["4"][0]["passed"]


def test_nothing_goes_on_for_long_beyond_its_section(monkeypatch):
    monkeypatch.setattr(pool, "_GRACE", 1.0)
    started = time.monotonic()
    found, left = pooled(monkeypatch, "if int(line) == 2: time.sleep(60)", seconds=4.0)
    assert time.monotonic() - started < 20
    assert list(found) == ["0", "1"]
    assert left == [(name, pool.NO_TIME) for name in "234"]


def test_processes_that_only_crash_are_given_up(monkeypatch):
    found, left = pooled(monkeypatch, "sys.exit(1)")
    assert list(found) == ["0", "1", "2"]
    assert left == [(name, "processes crashed one after the other") for name in "34"]


def test_a_report_that_fails_loses_its_task_by_name_and_no_other(monkeypatch):
    reported = []

    def report(task, records):
        if task.name == "1":
            raise TypeError("deliberately broken")
        reported.append(task.name)

    _, left = pooled(monkeypatch, "pass", report)
    assert reported == ["0", "2", "3", "4"]
    assert left == [("1", "TypeError: deliberately broken")]


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


def test_a_sanitizer_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n(sleep 4; touch {tmp_path}/alive) &\nsleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "find_tool", lambda: str(tool))
    assert sanitizer.finish(sanitizer.start(), 1.0)["reason"] == "not done in time"
    time.sleep(4)
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
    found = {figure.name: figure for figure in targets.figures(journal)}
    rate, at_32k, at_128k, even, training, learned, decoded = targets.NAMES
    assert found[rate].reached is False
    assert found[at_32k].value == pytest.approx(8 / 2**0.5)
    assert found[at_128k].value == pytest.approx(32 / 2**0.5)
    assert found[even].value == pytest.approx(2**12.5)
    assert found[training].reached is True
    assert targets.unmeasured(journal) == [learned, decoded]


def test_a_filled_state_decodes_at_its_position():
    for name in ("softmax", "random r=32"):
        model = language_model.build_model(name, CPU, quick=True).eval()
        state = model.init_state(2)
        decoding.fill(state, model, 40, room=3)
        logits, state = model.extend(torch.zeros(2, 1, dtype=torch.int64), state)
        assert state.position.tolist() == [41, 41]
        assert logits.isfinite().all()


def test_every_mechanism_of_the_table_is_checked_in_every_dtype_and_decodes_where_it_can():
    kinds = {name: kind for name, (kind, _) in mechanisms._MECHANISMS.items()}
    assert set(kinds.values()) == library.MECHANISMS.keys()
    names = {check.name for check in mechanisms.checks(quick=True)}
    for name, kind in kinds.items():
        assert {f"mechanism: {name}, {dtype}" for dtype in ("float32", "bfloat16", "float16")} <= names
        assert (f"decoding: {name}, float32" in names) == library.mechanism_class(kind).is_causal


def forgetful(module, query, key, value, state, **options):
    """Starts anew when it is given a single token."""
    if query.shape[2] == 1:
        state = module.init_state(query.shape[0])
    return INTACT_EXTEND(module, query, key, value, state, **options)


INTACT_EXTEND = library.HedgehogAttention.extend


def test_decoding_that_forgets_is_detected(monkeypatch):
    one = next(check for check in mechanisms.checks(quick=True) if check.name == "decoding: hedgehog, float32")
    assert run_check(one, CPU)["passed"]
    monkeypatch.setattr(library.HedgehogAttention, "extend", forgetful)
    assert not run_check(one, CPU)["passed"]


def test_floors_come_first_and_a_case_that_fails_ends_only_its_series(tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("deliberately too large")

    monkeypatch.setattr(timed_attention.calls, "polynomial", too_large)
    status, records = run("bench", tmp_path / "gpu.jsonl", "--only", "attention")
    failed = [record for record in records if record["kind"] == "failed" and record["series"].startswith("polynomial")]
    skipped = [record for record in records if record["kind"] == "skipped"]
    kinds = [record["kind"] for record in records]
    assert max(index for index, kind in enumerate(kinds) if kind == "floor") < kinds.index("time")
    assert status == 0
    assert failed
    assert all(record["out_of_memory"] for record in failed)
    assert any(record["series"].startswith("polynomial") for record in skipped)
    assert any(record["series"].startswith("learned") for record in records if record["kind"] == "time")


@pytest.mark.parametrize(("verb", "expected"), [("check", 1), ("bench", 0)])
def test_what_does_not_fit_the_budget_is_named_and_no_check_is_no_success(verb, expected, tmp_path):
    status, records = run(verb, tmp_path / "gpu.jsonl", "--budget-seconds", "0")
    assert status == expected
    assert not any(record["kind"] in ("check", "ratio", "time", "train", "decode") for record in records)
    reasons = {record["reason"] for record in records if record["kind"] == "skipped"}
    assert reasons == {"no time left in this section"}


def test_a_part_that_breaks_down_is_reported_at_the_end_and_is_no_success(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("deliberately broken")

    monkeypatch.setattr(gpu_check, "matrix_rate", broken)
    status, records = run("bench", tmp_path / "gpu.jsonl", "--only", "training")
    assert status == 1
    assert [record["part"] for record in records if record["kind"] == "crashed"] == ["rates"]
    assert any(record["kind"] == "train" for record in records)
    assert "CRASHED: rates" in capsys.readouterr().out


def test_a_table_that_breaks_down_does_not_take_the_picture_along(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "print_bench", crash)
    status, records = run("bench", tmp_path / "gpu.jsonl", "--only", "decoding")
    assert status == 1
    assert [record["part"] for record in records if record["kind"] == "crashed"] == ["table"]
    assert (tmp_path / "gpu.png").exists()


def test_sections_in_processes_of_their_own_write_the_same_file(tmp_path):
    status, records = run("bench", tmp_path / "gpu.jsonl", "--apart", "--only", "training")
    assert status == 0
    assert Counter(record["kind"] for record in records)["train"] == 2 * len(language_model.MODELS)


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
    [("if length == 1: sys.exit('illegal')", "illegal"), ("if length == 1: import time; time.sleep(60)", "nothing")],
)
def test_a_section_whose_process_dies_or_hangs_loses_one_case(death, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "_LONGEST_SILENCE", 5.0)
    journal = Journal(tmp_path / "gpu.jsonl")
    command = [sys.executable, "-c", DYING.format(death=death), str(journal.path)]
    apart.run_apart("training", lambda seconds: command, Budget(60).section(1.0), journal)
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


def test_checks_of_local_attention_give_sketched_weights_a_fair_share_of_the_mass():
    cases = [case for case in linear._cases() if case.local and case.length > case.local]
    for case in [*cases[::3], *map(linear.small, cases)]:
        assert 0.3 <= linear.prefix_share(case) <= 0.7, case.name


@pytest.fixture
def replaying(monkeypatch):
    """Steps are recorded and replayed on this CPU as on a device with graphs."""

    def step(model, state):
        split_positions(state)
        return CapturedStep(model, state, recorded(state))

    monkeypatch.setattr(library_captured, "why_no_graph", TransformerLM.why_not_captured)
    monkeypatch.setattr(library_captured, "CapturedStep", step)


@pytest.mark.parametrize("name", ["random", "learned", "gated"])
def test_replayed_steps_pass_their_check(name, replaying):
    found = captured.errors(name, torch.float64, CPU, local=None)
    assert {"first logits", "second positions", "second tokens"} <= found.keys()
    assert max(found.values()) < 1e-4


@pytest.mark.parametrize("broken", ["logits", "positions"])
def test_replayed_steps_that_go_wrong_are_detected(broken, replaying, monkeypatch):
    intact = library_captured.CapturedStep

    def step(model, state):
        replay = intact(model, state)

        def replayed(chosen):
            logits = replay(chosen)
            if broken == "positions":
                state.device_position += 1
            return logits if broken == "positions" else logits.roll(1, 0)

        return replayed

    monkeypatch.setattr(library_captured, "CapturedStep", step)
    assert captured.errors("random", torch.float64, CPU, local=None)[f"first {broken}"] > 0.1


def test_checks_of_other_devices_are_named_as_left_out(tmp_path, monkeypatch):
    some = some_tasks("captured", "softmax: causal")
    monkeypatch.setattr(gpu_check, "all_tasks", lambda *, quick: some)
    status, records = run("check", tmp_path / "gpu.jsonl")
    skipped = {record["name"]: record["reason"] for record in records if record["kind"] == "skipped"}
    assert status == 0
    assert len(skipped) == 6
    assert skipped["captured: polysketch gated, bfloat16"] == "only on cuda devices"


def test_decoding_is_charged_its_share_of_the_step_that_fills_a_chunk(monkeypatch):
    starts = []

    def seconds(step, rows, count, device):
        starts.append(int(STATES[-1].position[0]))
        return [1.0, 17.0, 1.0] if starts[-1] % 16 != 8 else [1.0] * count

    def stepper(model, rows):
        found = INTACT_STEPPER(model, rows)
        STATES.append(found[1])
        return found

    monkeypatch.setattr(decoding, "_step_seconds", seconds)
    monkeypatch.setattr(decoding, "_stepper", stepper)
    labels = {"model": "random r=32", "batch": 1, "position": 64}
    found = decoding._decode(Clock(CPU), Rates(1e12, 1e12), True, labels)
    assert starts == [72, 76, 76, 76]
    assert found["seconds"] == 2.0
    assert found["filling_step_seconds"] == 17.0


STATES: list = []
INTACT_STEPPER = decoding._stepper


def test_a_capture_that_fails_leaves_a_plain_step_and_says_why(monkeypatch):
    monkeypatch.setattr(decoding, "why_no_graph", lambda model, state: None)
    monkeypatch.setattr(decoding, "CapturedStep", crash)
    model = language_model.build_model("random r=32", CPU, quick=True).eval()
    step, state, reason = decoding._stepper(model, 2)
    with torch.inference_mode():
        assert step(torch.zeros(2, dtype=torch.int64)).isfinite().all()
    assert state.position.tolist() == [1, 1]
    assert "deliberately broken" in reason


def test_a_device_that_computes_no_more_ends_the_process_of_its_section(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", crash)
    with pytest.raises(cases.DeviceLost, match="deliberately broken"):
        cases.release_memory(torch.device("cuda"))
