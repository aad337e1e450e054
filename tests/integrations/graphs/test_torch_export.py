"""The same two graphs by `torch.export`: PyTorch's operators alone, and the model's logits wherever a text is cut."""

import pytest
import torch

from integrations.graphs.small import expected_logits, small
from integrations.vllm.lively import lively, prompts
from polysketch.attention import MECHANISMS
from polysketch.integrations.graphs import export_graphs
from polysketch.integrations.graphs.folder import write_model
from polysketch.integrations.graphs.model import SpanModel

pytestmark = pytest.mark.full


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_saved_programs_give_the_models_logits(tmp_path):
    model, ids = small("polysketch"), torch.tensor(prompts(45))
    spans, files = write_model(model, tmp_path, "torch-export")
    programs = {name: torch.export.load(tmp_path / file) for name, file in files.items()}
    operators = {str(node.target) for each in programs.values() for node in each.graph.nodes}
    assert not [name for name in operators if "polysketch" in name]
    expected, state, start = expected_logits(model, ids), [part.first for part in spans.parts], 0
    for size in (5, 1, 1, 20, 1, 17):
        graph = programs["step" if size == 1 else "prefill"].module()
        logits, *state = graph(ids[:, start : start + size], *state)
        start += size
        torch.testing.assert_close(logits[0], torch.tensor(expected[start - 1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "polynomial", "hyper", "polysketch-heavy"])
def test_a_layer_whose_state_grows_is_named_with_those_that_have_graphs(name):
    model = lively(attention=("polysketch", name), attention_options={name: {}})
    with pytest.raises(ValueError, match=f"layer 1 is {name}, whose state grows") as caught:
        SpanModel(model)
    able = str(caught.value).partition("layers that do: ")[2].split(", ")
    assert {"polysketch", "polysketch-paper", "linear", "sliding-window", "short-convolution"} <= set(able)
    assert not {"softmax", "polynomial", "hyper", "polysketch-heavy", "nystrom", "skyformer"} & set(able)
    assert set(able) - {"short-convolution"} <= set(MECHANISMS)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown format 'tflite'; known formats: onnx, torch-export"):
        export_graphs(tmp_path, tmp_path / "new", format="tflite")  # type: ignore[arg-type]
