"""What PyTorch does not promise to keep: which of it we use, and that all works without it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import polysketch
from polysketch import ops
from polysketch.ops import custom_op
from polysketch.ops.hyper import cpu_kernel
from polysketch.ops.learned_sketch import learned_sketch
from polysketch.ops.native import build

SOURCE = Path(polysketch.__file__).parent
GUARDED = {
    ("ops/custom_op.py", "torch.utils._python_dispatch"),
    ("ops/compiling.py", "function._dynamo_marked_constant"),
    ("integrations/replacement/function.py", "torch._assert_async"),
    ("ops/triton/self_check.py", "torch._C"),  # asked for by getattr, with an answer where it is missing
    # A tool for developers that stands for what PyTorch's own operators do with tensors without a device.
    ("ops/triton/ahead_of_time.py", "torch.utils._python_dispatch"),
    ("ops/triton/ahead_of_time.py", "torch.ops.aten._local_scalar_dense"),
}
"""(file, name); what stands here has a test below that does without it."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def private_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of PyTorch's, or marks of its compiler's, with a part that begins with an underscore."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):  # to write out the others takes seconds
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        for name in names:
            parts = name.split(".")
            ours = parts[0] == "torch" or parts[-1].startswith("_dynamo")
            private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if ours and private:
                yield ".".join(parts[: private[0] + 1])


def test_no_private_name_of_pytorch_is_used_beyond_those_that_are_guarded():
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        for name in private_names(ast.parse(path.read_text()))
    }
    assert found == GUARDED
    strings = [path for path in SOURCE.rglob("*.py") if "_scaled_dot_product" in path.read_text()]
    assert [path.relative_to(SOURCE).as_posix() for path in strings] == ["ops/hyper/cpu_kernel.py"]


@pytest.mark.parametrize("causal", [False, True])
def test_hyper_attention_without_the_kernel_gives_the_same(causal, monkeypatch):
    tensors = [normal(2, 2, 90, 8, seed=seed).requires_grad_() for seed in range(3)]
    options = {"hyperplanes": normal(8, 5), "min_length": 16, "chunk_size": 8, "sample_size": 8, "causal": causal}

    def run() -> list[torch.Tensor]:
        cpu_kernel.kernel_agrees.cache_clear()
        output = ops.hyper_attention(*tensors, **options)
        return [output, *torch.autograd.grad(output.square().sum(), tensors)]

    with_kernel = run()
    assert cpu_kernel.kernel_agrees()
    monkeypatch.setattr(cpu_kernel, "_NAME", "_not_there")
    without = run()
    assert not cpu_kernel.kernel_agrees()
    cpu_kernel.kernel_agrees.cache_clear()
    for one, other in zip(with_kernel, without, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    def other(*arguments, **options):
        output, log_sum = attention(*arguments, **options)
        return output, log_sum / torch.log(torch.tensor(2.0))  # of base two

    attention = cpu_kernel.attend
    monkeypatch.setattr(cpu_kernel, "attend", other)
    cpu_kernel.kernel_agrees.cache_clear()
    assert not cpu_kernel.kernel_agrees()
    cpu_kernel.kernel_agrees.cache_clear()


WEIGHTS = [normal(*shape, seed=i) for i, shape in enumerate([(4,), (4,), (32, 4), (4, 32)] * 4)]


def sketch(x: torch.Tensor) -> torch.Tensor:
    return learned_sketch(x, WEIGHTS, 2)


def test_without_a_look_at_dispatch_modes_operators_are_called(monkeypatch):
    x = normal(1, 2, 7, 4)
    with torch.no_grad():
        assert custom_op.nothing_looks_on(x)
        expected = sketch(x)
        monkeypatch.setattr(custom_op, "current_mode", None)
        assert not custom_op.nothing_looks_on(x)
        assert torch.equal(sketch(x), expected)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("known", [True, False])
def test_without_the_compilers_mark_compiled_calls_give_the_same(known, monkeypatch):
    x = normal(1, 2, 7, 4)
    expected = sketch(x)
    monkeypatch.delattr(build.why_unavailable, "_dynamo_marked_constant")
    monkeypatch.setattr(build, "_found", build._found if known else [])
    torch.compiler.reset()
    compiled = torch.compile(sketch, backend="eager", fullgraph=known)
    torch.testing.assert_close(compiled(x), expected)
    torch.compiler.reset()


def test_without_an_assertion_for_compiled_graphs_the_host_asserts(monkeypatch):
    function = pytest.importorskip("polysketch.integrations.replacement.function")
    monkeypatch.delattr(torch, "_assert_async")
    function.assert_true(torch.tensor(True), "as it should be")
    with pytest.raises(RuntimeError, match="packed"):
        function.assert_true(torch.tensor(False), "packed sequences")
