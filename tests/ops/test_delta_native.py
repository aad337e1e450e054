"""The programs of the delta rule: few tokens are read themselves, many by sums over them, and both as defined."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops.delta import native
from polysketch.ops.native import build, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SOURCE = Path(build.__file__).parent / "source"
# Features, factors and width of values, with which blocks of tokens are kept; and the same of so many tokens that sums
# take their place, forward alone or backward too.
KEPT = [(48, 2, 33, 70), (48, 2, 16, 97), (200, 1, 65, 70), (64, 2, 65, 160)]
BACKWARD_BY_SUMS = [(32, 2, 33, 120)]
BY_SUMS = [(8, 2, 33, 70), (24, 1, 17, 70)]


def inputs(features: int, factors: int, width: int, length: int) -> list[Tensor]:
    """Queries of twice as many heads as keys, keys, values and strengths; the keys lean toward each other."""
    draw = torch.Generator().manual_seed(length)

    def rand(heads: int, *shape: int) -> Tensor:
        return torch.randn(2, heads, length, *shape, generator=draw, dtype=torch.float64)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize((x + 0.4).unflatten(-1, (factors, -1)), dim=-1).flatten(-2)

    return [unit(rand(4, features)), unit(rand(2, features)), rand(2, width), rand(2).sigmoid()]


def with_gradients(given: list[Tensor], factors: int, backend: str) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    output = ops.delta_attention(*given, factors=factors, backend=backend)
    weights = torch.arange(output.numel(), dtype=output.dtype).sin().view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), given)]


def assert_exact(features: int, factors: int, width: int, length: int) -> None:
    given = inputs(features, factors, width, length)
    found = with_gradients([x.float() for x in given], factors, "native")
    for one, other in zip(found, with_gradients(given, factors, "reference"), strict=True):
        error = float((one - other).norm() / other.norm())
        assert error < 1e-5, f"beyond rounding: {error}"


def assert_all_exact() -> None:
    for case in KEPT:
        assert_exact(*case)


@pytest.mark.parametrize("case", [*KEPT, *BACKWARD_BY_SUMS, *BY_SUMS], ids=str)
def test_answers_and_gradients_are_those_of_the_definition(case):
    assert_exact(*case)


MUTANTS = {
    "the first block's answer alone": ("{output, row_}, &block != &blocks_[0])", "{output, row_}, false)"),
    "masses forgotten": ("add_scaled(block.masses[key], joint", "add_scaled(0.0f, joint"),
    "one factor": ("kPairs);\n    return product_;", "kPairs);\n    return weights_;"),
    "the gradient of masses forgotten": ("(block.masses[key], mass_gradient", "(0.0f, mass_gradient"),
    "the gradient with the factor itself": (
        "(1 - f) * kPairs, product_, kPairs);\n          g",
        "f * kPairs, product_, kPairs);\n          g",
    ),
    "the gradient of the last block alone": ("{dx + at, kBlock}, true)", "{dx + at, kBlock}, false)"),
    "gradients of all rows of the first factor": (
        "{block.features + at, kBlock, 1}",
        "{block.features + 0, kBlock, 1}",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_program_is_caught(name, monkeypatch, tmp_path):
    broken = with_mutant(*MUTANTS[name], tmp_path)
    monkeypatch.setattr(native, "library", lambda: broken)
    with pytest.raises(AssertionError, match="beyond rounding"):
        assert_all_exact()


def with_mutant(old: str, new: str, folder: Path) -> ctypes.CDLL:
    """These programs, and those that they call, with one place of the header changed."""
    (folder / "source").mkdir()
    for path in (*SOURCE.glob("*.h"), *SOURCE.glob("delta_rule*.cpp"), *SOURCE.glob("bfloat16*.cpp")):
        shutil.copy(path, folder / "source")
    file = folder / "source" / "delta_rule.h"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return ctypes.CDLL(str(build.compiled(folder / "source", folder)))
