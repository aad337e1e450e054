"""The recipe for ExecuTorch on the page of graphs: the model's logits, and the text that `generate` writes."""

import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch", reason="executorch is not installed here: make test-executorch brings it")

from docs.pages import ROOT, blocks_of
from integrations.graphs.small import expected_logits, small
from integrations.huggingface.runs import make_run_in
from integrations.vllm.lively import prompts
from polysketch import cli
from polysketch.integrations.graphs.folder import write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of executorch's own

PROMPT = "It was the "
LOWERING, WRITING = (block.code for block in blocks_of(ROOT / "docs/onnx.md") if "from executorch" in block.code)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the page names."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # else pytest keeps every line of it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "programs").mkdir()
    return tmp_path / "programs"


@pytest.mark.parametrize("kind", ["polysketch", "polysketch-paper", "linear-and-window", "gated"])
def test_a_step_gives_the_models_logits(kind, programs):
    from executorch.runtime import Runtime

    model, ids = small(kind), torch.tensor(prompts(45))
    spans, _ = write_model(model, programs, "torch-export")
    exec(LOWERING, {})
    method = Runtime.get().load_program(str(programs / "step.pte")).load_method("forward")
    state = [part.first for part in spans.parts]
    expected = torch.tensor(expected_logits(model, ids))
    found = []
    for token in ids[0]:
        logits, *after = method.execute([token[None, None], *state])
        state = [part.clone() for part in after]
        found.append(logits[0].clone())
    # XNNPACK's exponential has fewer digits than PyTorch's.
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-3 * expected.abs().max().item())


def test_the_program_of_the_page_writes_what_generate_writes(programs, capsys):
    programs.rmdir()
    run, _ = make_run_in(programs.parent, "bytes")
    assert cli.main(["export", str(run), "programs", "--format", "torch-export"]) == 0
    assert PROMPT in WRITING
    exec(LOWERING, {})
    capsys.readouterr()
    exec(WRITING, {})
    written = capsys.readouterr().out.rstrip("\n")
    assert cli.main(["generate", str(run), "--prompt", PROMPT, "--max-new-tokens", "40", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == PROMPT + written
    assert len(written) >= 30
