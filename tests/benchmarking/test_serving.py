"""The benchmark of serving measures a server as users start it, and any other one by its address."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from polysketch.benchmarking import serving as serving_file
from polysketch.benchmarking.models import build_model
from polysketch.benchmarking.server_process import never_ending, serving, write_run
from polysketch.benchmarking.settings import ServingSettings
from polysketch.benchmarking.way_names import Sizes
from polysketch.cli import main
from polysketch.training import load_model

SMALL = ["--users", "2", "--prompt-lengths", "12", "600", "--new-tokens", "3", "--requests", "2", "--beside", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    write_run(folder, never_ending(build_model("softmax", "tiny", Sizes())))
    return folder


def test_a_run_of_random_weights_is_loaded_as_it_was_made(run):
    model, described = load_model(run)
    made = never_ending(build_model("softmax", "tiny", Sizes()))
    assert all(torch.equal(found, made.state_dict()[name]) for name, found in model.state_dict().items())
    assert described.tokenizer.decode([ord("a")]) == "a"


ASKS = """
import sys, time
from polysketch.benchmarking.server_process import serving
from pathlib import Path
with serving(Path(sys.argv[1]), threads=1) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells which processes run")
def test_sigterm_leaves_no_server_behind(run):
    with subprocess.Popen([sys.executable, "-c", ASKS, str(run)], stdout=subprocess.PIPE, text=True) as asking:
        server = int(asking.stdout.readline())
        assert os.path.exists(f"/proc/{server}")
        asking.terminate()
        assert asking.wait(60) == 128 + signal.SIGTERM
    assert not os.path.exists(f"/proc/{server}")


def test_all_prompts_go_on_from_the_end_of_the_first_request():
    """There the server keeps a snapshot, so that each user's prompt has a few tokens left to read."""
    prompts: list[list[int]] = []

    class Site:
        process = None

        async def ask(self, prompt, new_tokens):
            prompts.append(list(prompt))
            return [0.0, *(1.0 + number for number in range(new_tokens))]

    asyncio.run(serving_file._loaded(Site(), 3, 100, ServingSettings(requests=2)))
    first, *others = prompts
    assert [len(prompt) for prompt in others] == [100] * 6
    assert all(prompt[:96] == first for prompt in others)
    assert len({tuple(prompt) for prompt in others}) == 6


@pytest.mark.full
@pytest.mark.timeout(600)  # three servers are started
def test_tables_a_record_and_a_plot_are_made(tmp_path, capsys):
    out, plot = tmp_path / "serving.json", tmp_path / "serving.png"
    flags = ["--mechanisms", "softmax", "--threads", "1", *SMALL, "--json", "--out", str(out), "--plot", str(plot)]
    assert main(["benchmark", "serving", *flags]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    told = [line for line in printed.err.splitlines() if line.startswith("  [")]
    assert [line.split(",")[0] for line in told] == [f"  [{number} of 6" for number in range(1, 7)]  # into a file, too
    assert all("s left]" in line for line in told[1:])
    assert found == json.loads(out.read_text())
    assert {"device", "torch", "commit", "polysketch"} <= found["environment"].keys()
    short, long = found["load"]
    assert [(cell["users"], cell["prompt"], cell["requests"]) for cell in (short, long)] == [(2, 12, 4), (2, 600, 4)]
    for cell in (short, long):
        assert cell["tokens_per_second"] == pytest.approx(3 * cell["requests_per_second"])
        assert 0 < cell["first_token"]["median"] <= cell["first_token"]["percentile_99"]
        assert cell["between_tokens"]["count"] == 4 * 2
        assert cell["tokens_per_cpu_second"] > 0
    assert long["state_bytes"] - short["state_bytes"] == 2 * 588 * 2 * 4 * 128 * 4  # keys and values of four layers
    if os.path.exists("/proc/self/status"):
        assert long["server_bytes"] > 50_000_000
    assert [cell["prompt"] for cell in found["reading"]] == [12, 600]
    assert all(cell["first_token_of_next_turn"]["count"] == 2 for cell in found["reading"])
    (beside,) = found["beside"]
    assert beside["alone"]["between_tokens"]["count"] > 0
    assert beside["while_reading"]["seconds"] > 0
    assert plot.stat().st_size > 1_000


@pytest.mark.full
def test_another_server_is_measured_by_its_address(run, capsys):
    """With its token; what only a process of ours tells is left out, and so is what would not fit in memory."""
    with serving(run, "--concurrent", "4", threads=1, token="secret") as process:
        asked = ["--url", f"{process.address}/v1", "--token", "secret", *SMALL, "--memory", "3", "--json"]
        assert main(["benchmark", "serving", *asked]) == 0
        printed = capsys.readouterr().out
        assert "secret" not in printed
        found = json.loads(printed.splitlines()[-1])
        short, long = found["load"]
        assert (short["series"], short["server_bytes"], short["tokens_per_cpu_second"]) == ("model", None, None)
        assert short["tokens_per_second"] > 0
        assert long["left_out"].startswith("states of ")
        assert process.stop() == 0
        assert process.log.read_text() == ""


@pytest.mark.full
def test_a_server_that_refuses_is_an_error_of_one_line(run, capsys):
    with serving(run, "--max-prompt-tokens", "10", threads=1) as process:
        assert main(["benchmark", "serving", "--url", process.address, *SMALL]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert "expected status 200, found 400" in line


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"did not start: .*expected a run folder"), serving(tmp_path / "none"):
        pass


def test_what_a_client_saw_becomes_figures():
    """The wait for the first token is no time between tokens."""
    assert serving_file._gaps([0.0, 5.0, 6.0, 8.0]) == [1.0, 2.0]
    assert serving_file._gaps_within([1.0, 2.0, 4.0, 7.0], 2.0, 6.9) == [2.0]
    assert serving_file._spread([3.0, 1.0, 2.0]) == {"median": 2.0, "mean": 2.0, "percentile_99": 3.0, "count": 3}
    assert serving_file._spread([]) is None
