"""The GPU script, tried with tiny sizes on a CPU: it runs to its end, and it sees what is broken."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.checks import linear, mechanisms
from benchmarks.gpu import attention as timed_attention

from benchmarks import gpu_check
from polysketch import attention as library
from polysketch.ops.linear import api


def run(out: Path, *options: str) -> tuple[int, list[dict]]:
    """Exit status and records of the script on this CPU."""
    status = gpu_check.main(["--device", "cpu", "--quick", "--out", str(out), *options])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


def test_the_whole_script_passes_and_records_every_part(tmp_path, capsys):
    status, records = run(tmp_path / "gpu.jsonl")
    kinds = Counter(record["kind"] for record in records)
    assert status == 0
    assert kinds["environment"] == kinds["rates"] == 1
    assert kinds["check"] > 300
    assert kinds["train"] == 4
    assert kinds["decode"] == 8
    assert kinds["floor"] == len(timed_attention.cases(quick=True))
    timed = {(record["series"], record["direction"]) for record in records if record["kind"] == "time"}
    assert {series for series, _ in timed} >= {"sdpa flash", "polysketch r=32 local=1024", "polynomial degree=4"}
    assert {direction for _, direction in timed} == {"forward", "forward+backward"}
    assert f"{kinds['check']} of {kinds['check']} checks passed" in capsys.readouterr().out


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
    some = [check for check in linear.checks(quick=True) if check.name.startswith("linear: power")][::9]
    monkeypatch.setattr(gpu_check, "all_checks", lambda *, quick: some)
    status, records = run(tmp_path / "gpu.jsonl", "--only", "checks")
    checks = [record for record in records if record["kind"] == "check"]
    assert status == 1
    assert len(checks) == len(some)
    assert not any(check["passed"] for check in checks)


def test_the_intact_backend_passes_the_same_checks():
    some = [check for check in linear.checks(quick=True) if check.name.startswith("linear: power")][::9]
    assert all(gpu_check.run_check(check, torch.device("cpu"))["passed"] for check in some)


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
    assert gpu_check.run_check(one, torch.device("cpu"))["passed"]
    monkeypatch.setattr(library.HedgehogAttention, "extend", forgetful)
    assert not gpu_check.run_check(one, torch.device("cpu"))["passed"]


def test_floors_come_first_and_a_case_that_fails_ends_only_its_series(tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("deliberately too large")

    monkeypatch.setattr(timed_attention.calls, "polynomial", too_large)
    status, records = run(tmp_path / "gpu.jsonl", "--only", "attention")
    failed = [record for record in records if record["kind"] == "failed" and record["series"].startswith("polynomial")]
    skipped = [record for record in records if record["kind"] == "skipped"]
    kinds = [record["kind"] for record in records]
    assert max(index for index, kind in enumerate(kinds) if kind == "floor") < kinds.index("time")
    assert status == 0
    assert failed
    assert all(record["out_of_memory"] for record in failed)
    assert any(record["series"].startswith("polynomial") for record in skipped)
    assert any(record["series"].startswith("polysketch") for record in records if record["kind"] == "time")


def test_what_does_not_fit_the_budget_is_named_and_no_check_is_no_success(tmp_path):
    status, records = run(tmp_path / "gpu.jsonl", "--budget-seconds", "0")
    assert status == 1
    assert not any(record["kind"] in ("check", "time", "train", "decode") for record in records)
    reasons = {record["reason"] for record in records if record["kind"] == "skipped"}
    assert reasons == {"no time left in this section"}


def test_a_part_that_breaks_down_is_reported_at_the_end_and_is_no_success(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("deliberately broken")

    monkeypatch.setattr(gpu_check, "matrix_rate", broken)
    monkeypatch.setattr(gpu_check, "all_checks", lambda *, quick: linear.checks(quick)[:1])
    status, records = run(tmp_path / "gpu.jsonl")
    assert status == 1
    assert [record["part"] for record in records if record["kind"] == "crashed"] == ["timing"]
    assert "1 of 1 checks passed" in capsys.readouterr().out


def test_without_a_gpu_the_default_device_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--device cpu" in capsys.readouterr().out


def test_checks_of_local_attention_give_sketched_weights_a_fair_share_of_the_mass():
    cases = [case for case in linear._cases() if case.local and case.length > case.local]
    for case in [*cases[::3], *map(linear._small, cases)]:
        assert 0.3 <= linear.prefix_share(case) <= 0.7, case.name
