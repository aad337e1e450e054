"""Compiled into one graph, every mechanism computes what it computes without, and so do its gradients."""

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, Case
from polysketch import attention

ONE_CASE_EACH = [next(case for case in CASES if case.name == name) for name in {c.name: 0 for c in CASES}]
LENGTH = 20  # beyond a chunk of 8 tokens; hyper halves it twice
TOLERANCE = 1e-5  # of a tensor's largest entry: where terms cancel, an entry keeps the rounding of these
# Attention of features is one code but for its map; landmarks are found alike; chunks and windows are in others too.
# tests/models compiles a whole model of polysketch-paper, tests/ops checks the operators of hyper.
ALIKE = (
    *("hyper", "polysketch-paper"),
    *("based", "focused", "hedgehog", "llops", "local", "nystrom", "performer", "polarity", "polynomial", "skyformer"),
    *("polysketch-window", "squared-polynomial", "symmetric-power"),
)


def output_and_gradients(mechanism: attention.Mechanism, attend, case: Case) -> list[Tensor]:
    """The output, then the gradients of query, key, value and every parameter."""
    query, key, value, hidden = (x.requires_grad_() for x in case.inputs(dtype=torch.float32, batch=1, length=LENGTH))
    output = attend(query, key, value, hidden=hidden, causal=mechanism.is_causal)
    inputs = (query, key, value, *mechanism.parameters())
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


def assert_compiled_equals_eager(case: Case, backend: str) -> None:
    mechanism = case.build(dtype=torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(mechanism, backend=backend, fullgraph=True)
    found, expected = (output_and_gradients(mechanism, attend, case) for attend in (compiled, mechanism))
    for one, other in zip(found, expected, strict=True):
        largest = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=0.0, atol=TOLERANCE * largest)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * (case.name in ALIKE)) for case in ONE_CASE_EACH],
    ids=str,
)
def test_one_graph_computes_the_same(case: Case):
    assert_compiled_equals_eager(case, "aot_eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # PyTorch's own
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("polynomial", {}, torch.float32),
        pytest.param("polynomial", {}, torch.float64, marks=pytest.mark.full),
        pytest.param("local", {"local_chunk": 4}, torch.float32, marks=pytest.mark.full),
        ("polysketch-paper", {"local_chunk": 4}, torch.float64),
    ],
)
def test_a_degree_may_be_a_symbol(name, options, dtype):
    """With `dynamic=True` numbers of modules are symbols, too."""
    mechanism = attention.build(name, num_heads=2, head_dim=8, **options).to(dtype)
    torch.compiler.reset()
    compiled = torch.compile(mechanism, backend="aot_eager", dynamic=True)
    inputs = [torch.randn(1, 2, 9, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    outputs = [attend(*inputs) for attend in (compiled, mechanism)]
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    for one, other in zip(*([output, *found] for output, found in zip(outputs, gradients, strict=True)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.full
def test_one_graph_of_any_options_computes_the_same(case: Case):
    assert_compiled_equals_eager(case, "aot_eager")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.full
@pytest.mark.parametrize("case", ONE_CASE_EACH, ids=str)
def test_generated_code_computes_the_same(case: Case):
    assert_compiled_equals_eager(case, "inductor")
