"""`polysketch serve`: what it says at the start, how many requests fit, and which engine it takes."""

import os
import re
import signal
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

import polysketch.cli.serve  # noqa: F401  (patched by name)
from polysketch.cli import main
from polysketch.integrations.transformers_folder import MODEL_TYPE

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from polysketch.generation import bytes_of_request
from polysketch.models import ModelConfig, TransformerLM
from polysketch.serving import running


@pytest.fixture
def _run(stand_in_run, small_linear_model):
    stand_in_run(small_linear_model)


@pytest.fixture(scope="module")
def small_linear_model() -> TransformerLM:
    return TransformerLM(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="linear"))


@pytest.fixture
def asked(monkeypatch):
    """What a client was answered while the command ran; then the command is told to stop."""
    answers = []
    original = running.run_app

    def run_app(app, listening, *, grace, ready):
        def client() -> None:
            with urllib.request.urlopen(f"{running.address_of(listening)}/health", timeout=20) as response:
                answers.append(response.read().decode())
            os.kill(os.getpid(), signal.SIGTERM)

        def tell() -> None:
            ready()
            threading.Thread(target=client).start()

        original(app, listening, grace=grace, ready=tell)

    monkeypatch.setattr(running, "run_app", run_app)
    return answers


@pytest.mark.usefixtures("_run")
def test_it_says_where_it_is_and_what_a_request_takes(asked, capsys):
    assert main(["serve", "run", "--port", "0", "--concurrent", "9999", "--state-memory", "1"]) == 0
    assert asked == ['{"status":"ok"}']
    where, states, curl, page, end = capsys.readouterr().out.splitlines()
    address = re.fullmatch(r"serving run at (http://127\.0\.0\.1:\d+)", where)[1]
    size, slots, fitting = (int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", states)[:3])
    assert slots == fitting == 2**20 // size
    assert curl.startswith(f"curl {address}/v1/completions ")
    assert page.startswith(f"in a browser: {address}/ to write")
    assert end == "stopped"


@pytest.mark.usefixtures("_run")
def test_a_server_for_everybody_without_a_token_warns(asked, capsys, monkeypatch):
    monkeypatch.delenv("POLYSKETCH_TOKEN", raising=False)
    assert main(["serve", "run", "--port", "0", "--host", "0.0.0.0"]) == 0
    assert "everybody who reaches 0.0.0.0 may ask: set POLYSKETCH_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("POLYSKETCH_TOKEN", "secret")
    assert main(["serve", "run", "--port", "0", "--host", "0.0.0.0"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Bearer $POLYSKETCH_TOKEN" in printed.out
    assert "secret" not in printed.out


@pytest.mark.usefixtures("_run")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrent", "0"], "--concurrent: expected at least 1 request, found 0"),
        (["--state-memory", "0"], "--state-memory: expected at least 1 megabytes, the state of one request, found 0"),
        (["--chunk", "0"], "chunk of at least 1 token"),
        (["--max-new-tokens", "0"], "new_tokens of at least 1"),
        (["--engine", "vllm"], "vLLM is not installed"),
    ],
)
def test_bad_input_gives_one_line_and_status_1(capsys, flags, message):
    assert main(["serve", "run", "--port", "0", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_of_a_model_whose_state_grows_it_says_what_a_token_takes(stand_in_run, asked, capsys):
    model = TransformerLM(ModelConfig(257, num_layers=2, hidden_size=64, num_heads=1, attention=("linear", "softmax")))
    stand_in_run(model)
    assert main(["serve", "run", "--port", "0"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("a request's state"))
    assert re.search(
        r"bytes and 512 for each token; 32 run at once, as far as their longest texts fit in 1,024 MB", line
    )


VLLM = """
import os, sys
from pathlib import Path
(Path(os.environ["HERE"]) / "arguments").write_text(" ".join(sys.argv[1:]))
(Path(os.environ["HERE"]) / "token").write_text(os.environ.get("VLLM_API_KEY", ""))
sys.exit(int(os.environ["STATUS"]))
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package of that name whose server notes how it was called."""
    server = tmp_path / "packages" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("STATUS", "0")
    return tmp_path


def exported(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"model_type": "{MODEL_TYPE}"}}')
    return folder


def test_an_exported_folder_is_served_by_vllm_where_that_is_installed(vllm, monkeypatch, capsys):
    folder = exported(vllm / "mine")
    monkeypatch.setenv("POLYSKETCH_TOKEN", "secret")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (folder / "chat.jinja").touch()
    template = str(folder / "chat.jinja")
    assert main(["serve", str(folder), "--port", "81", "--name", "other", "--chat-template", template]) == 0
    expected = f"--model {folder} --served-model-name other --host 127.0.0.1 --port 81"
    of_a_cpu = "--dtype float32 --kv-cache-memory-bytes 1073741824"  # as the run has it, within --state-memory
    assert (vllm / "arguments").read_text() == f"{expected} {of_a_cpu} --chat-template {template}"
    assert (vllm / "token").read_text() == "secret"
    where, states, curl, line = capsys.readouterr().out.splitlines()
    assert where == "serving other at http://127.0.0.1:81 by vLLM, once it has loaded"
    assert re.match(r"a request's states take [\d,]+ bytes at any length", states)
    assert curl.startswith('curl http://127.0.0.1:81/v1/completions -H "Authorization: Bearer $POLYSKETCH_TOKEN"')
    assert line.endswith(template)
    assert "secret" not in line
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("STATUS", "3")
    assert main(["serve", str(folder)]) == 3
    assert "--dtype" not in (vllm / "arguments").read_text()


@pytest.mark.usefixtures("_run")
def test_a_run_is_served_by_vllm_when_that_is_asked_for(vllm, monkeypatch):
    """It is exported first, once; without being asked, a run is served by our own engine."""
    written = []

    def export_run(run: Path, folder: Path, *, checkpoint: str) -> None:
        written.append(folder)
        exported(folder)

    monkeypatch.setattr("polysketch.integrations.huggingface.export_run", export_run)
    monkeypatch.chdir(vllm)
    Path("run").mkdir()
    for _ in range(2):
        assert main(["serve", "run", "--engine", "vllm"]) == 0
    assert written == [Path("run/exported-run")]
    assert "--model run/exported-run --served-model-name run " in (vllm / "arguments").read_text()


@pytest.mark.parametrize(
    ("attention", "ending"),
    [
        ("linear", "fit in 3 MB, half as many with their prefixes kept"),
        (("linear", "softmax"), "and vLLM's own keys and values for each token"),
    ],
)
def test_with_vllm_it_says_what_a_request_takes(tmp_path, attention, ending):
    """The states, each filled up to the largest; every page begins at a multiple of 64 bytes."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from polysketch.integrations.huggingface import PolysketchForCausalLM
    from polysketch.serving.vllm import about_states

    model = TransformerLM(ModelConfig(257, num_layers=2, hidden_size=64, num_heads=1, attention=attention))
    PolysketchForCausalLM.from_transformer(model).save_pretrained(tmp_path)
    said = about_states(tmp_path, megabytes=3)
    assert said.endswith(ending)
    size, page, count = (int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", said)[:3])
    assert count == (2 if attention == "linear" else 1)
    assert size == page * count
    assert 0 <= size - (bytes_of_request(model, 0) - model.init_state(1).position.nbytes) <= 64 * 4 * count
    if attention == "linear":
        assert f"; {3 * 2**20 // size} fit" in said
    halved = about_states(tmp_path, megabytes=None)
    assert page / 2 <= int(re.search(r"pages of ([\d,]+)", halved)[1].replace(",", "")) <= page
