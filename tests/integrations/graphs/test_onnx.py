"""The two graphs in ONNX Runtime: what the model gives, wherever a text is cut."""

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnxscript", reason="the extra onnx is not installed")

from integrations.graphs.small import KINDS, expected_logits, run
from integrations.vllm.lively import prompts
from polysketch.generation import generate

LENGTH = 60
TURNS = [
    [LENGTH],
    [3, 1, 1, 1, 1, 13, 1, 1, 30, 8],
    [7, 9, 16, 1, 27],
]
"""A text in parts: of one token by the step, of more by the prefill. Chunks and windows are of 8 tokens."""

BOUND = 1e-5  # of the error of logits, relative to their size; ten times tighter than what is promised
FAST = [pytest.param(kind, marks=[] if number < 1 else [pytest.mark.full]) for number, kind in enumerate(KINDS)]


def logits_by_graphs(made, ids, sizes, broken=lambda state: state) -> list[np.ndarray]:
    """The logits after every part; `broken` changes what is handed on."""
    sessions, state, start, found = made.sessions, made.first_state(), 0, []
    for size in sizes:
        graph = sessions["step" if size == 1 else "prefill"]
        outputs = run(graph, ids[:, start : start + size], state)
        state, start = broken(made.inputs_of(outputs)), start + size
        found.append(outputs["logits"][0])
    return found


def error(made, ids, sizes, **options) -> float:
    """The largest difference from the model's logits, relative to their size."""
    whole = expected_logits(made.model, ids)
    ends = np.cumsum(sizes) - 1
    found = np.stack(logits_by_graphs(made, ids, sizes, **options))
    return float(np.abs(found - whole[ends]).max() / np.abs(whole).max())


@pytest.mark.parametrize("kind", FAST)
def test_logits_are_the_models_wherever_the_text_is_cut(exported, kind):
    made, ids = exported(kind), torch.tensor(prompts(LENGTH))
    for sizes in TURNS:
        assert error(made, ids, sizes) < BOUND


@pytest.mark.parametrize("kind", FAST)
def test_the_state_has_one_size_that_the_signature_says(exported, kind):
    made = exported(kind)
    for name, session in made.sessions.items():
        sizes = {part["input"]: part["shape"] for part in made.manifest["state"]}
        found = {each.name: each.shape for each in session.get_inputs()}
        ids = found.pop("ids")
        assert ids[0] == 1
        assert (ids[1] == 1) == (name == "step")
        assert found == sizes
        outputs = {each.name: each.shape for each in session.get_outputs()}
        assert outputs.pop("logits") == [1, made.manifest["vocab_size"]]
        assert outputs == {part["output"]: part["shape"] for part in made.manifest["state"]}


@pytest.mark.parametrize("kind", FAST)
def test_greedy_tokens_are_those_of_generate(exported, kind):
    made, (prompt,) = exported(kind), prompts(21)
    expected = generate(made.model, [prompt], max_new_tokens=24, temperature=0.0).tokens[0]
    sessions, found = made.sessions, []
    outputs = run(sessions["prefill"], torch.tensor([prompt]), made.first_state())
    while len(found) < 24:
        found.append(int(outputs["logits"][0].argmax()))
        outputs = run(sessions["step"], torch.tensor([[found[-1]]]), made.inputs_of(outputs))
    assert found == expected
    assert kind == "linear-and-window" or len(set(found)) >= 4  # which repeats itself


@pytest.mark.parametrize("kind", FAST)
def test_a_part_of_the_state_that_is_lost_or_in_anothers_place_is_seen(exported, kind):
    """Mutants: every output dropped once, and every two of one shape exchanged, are beyond the bound on logits."""
    made, ids, sizes = exported(kind), torch.tensor(prompts(LENGTH)), [21, 1, 1, 20, 17]
    parts = {part["input"]: tuple(part["shape"]) for part in made.manifest["state"]}
    unread = {name for name in parts if name.endswith("normalizer") and kind in ("means", "sketches")}
    for name in parts.keys() - unread:
        assert error(made, ids, sizes, broken=lambda state, name=name: state | {name: 0 * state[name]}) > BOUND, name
    names = sorted(parts.keys() - unread)
    pairs = [(a, b) for a in names for b in names if a < b and parts[a] == parts[b]]
    for a, b in pairs:
        assert error(made, ids, sizes, broken=lambda state, a=a, b=b: state | {a: state[b], b: state[a]}) > BOUND, (
            a,
            b,
        )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("polysketch", ["delta"]), pytest.param("polysketch-paper", [], marks=pytest.mark.full)],
)
def test_sums_are_nodes_of_the_operator_where_nothing_is_exact_beside_them(exported, kind, expected):
    onnx = pytest.importorskip("onnx")
    made = exported(kind)
    for file in made.manifest["graphs"].values():
        graph = onnx.load(made.folder / file, load_external_data=False).graph
        nodes = [node for node in graph.node if node.op_type == "LinearAttention"]
        found = [each.s.decode() for node in nodes for each in node.attribute if each.name == "update_rule"]
        assert found == expected


def test_both_graphs_share_one_file_of_weights(exported):
    made = exported("polysketch")
    sizes = {path.name: path.stat().st_size for path in made.folder.iterdir()}
    weights = sum(x.numel() * x.element_size() for x in made.model.parameters())
    assert sizes.keys() == {"prefill.onnx", "step.onnx", "weights.data"}
    assert sizes["weights.data"] < 1.3 * weights
