"""The page of ONNX as a reader follows it: a run is exported, and its program generates without PyTorch."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnxscript", reason="the extra onnx is not installed")

from docs.pages import ROOT, blocks_of
from integrations.huggingface.runs import make_run_in
from polysketch import cli

WITHOUT_PYTORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "polysketch", "transformers"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
"""
PROMPT = "It was the "


@pytest.mark.full
def test_the_program_of_the_page_writes_what_generate_writes(tmp_path, monkeypatch, capsys):
    run, _ = make_run_in(tmp_path, "bytes")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run), "edge", "--format", "onnx"]) == 0
    files = {path.name for path in (tmp_path / "edge").iterdir()}
    graphs = {"prefill.onnx", "step.onnx", "weights.data"}
    assert files == graphs | {"manifest.json", "config.json", "tokenizer.json", "SHA256SUMS"}
    manifest = json.loads((tmp_path / "edge/manifest.json").read_text())
    assert (manifest["run"], manifest["format"], manifest["step_of_training"]) == ("run", "onnx", 4)
    assert manifest["state_bytes"] > 0

    (program,) = [block.code for block in blocks_of(ROOT / "docs/onnx.md") if "onnxruntime" in block.code[:60]]
    assert PROMPT in program
    found = subprocess.run([sys.executable, "-c", WITHOUT_PYTORCH + program], capture_output=True, check=False)
    assert found.returncode == 0, found.stderr.decode()
    assert len(found.stdout) > 40
    capsys.readouterr()
    wanted = ["--prompt", PROMPT, "--max-new-tokens", "40", "--temperature", "0"]
    assert cli.main(["generate", str(run), *wanted]) == 0
    assert capsys.readouterr().out.rstrip("\n").endswith(found.stdout.decode().rstrip("\n"))
