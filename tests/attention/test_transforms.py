"""What torch.func does with a mechanism is what the page says: the right number or an error, never another number."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, Case
from polysketch import attention, ops

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "derivatives.md"
IS_PINNED = f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
"""Whether the table was made with this PyTorch; another one may refuse more, or less."""
REFUSALS = (RuntimeError, NotImplementedError)
FIRST = {case.name: case for case in reversed(CASES)}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
DIFFERENCE = {torch.float64: 1e-5, torch.float32: 3e-3}
TOLERANCE = {torch.float64: {"rtol": 1e-5, "atol": 1e-5}, torch.float32: {"rtol": 5e-2, "atol": 5e-2}}

# PyTorch's own: how it reads its formulas of forward mode for the first time, and how it maps over our operators.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning"),
]


class Attended:
    """A mechanism as a function of queries, keys and values, with everything else as in a case."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        *self.inputs, hidden = case.inputs(dtype=dtype)
        self.mechanism: Callable[..., Tensor] = case.build(dtype=dtype)
        self._options = {"causal": attention.mechanism_class(case.name).is_causal}
        if "hidden_size" in case.options:
            self._options["hidden"] = hidden

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.mechanism(*inputs, **self._options)

    def loss(self, *inputs: Tensor) -> Tensor:
        return self(*inputs).square().sum()

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in self.inputs]

    def directions(self) -> list[Tensor]:
        return [torch.randn_like(x) for x in self.inputs]


Pair = tuple[Tensor, Tensor]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers in a row."""
    return torch.cat([x.flatten() for x in tensors])


def vmap(attended: Attended) -> Pair:
    """Over two batches, and one after the other."""
    rows = [torch.stack([x, x.flip(2)]) for x in attended.inputs]
    mapped = torch.vmap(attended, randomness="same")(*rows)
    return mapped, torch.stack([attended(*row) for row in zip(*rows, strict=True)])


def grad(attended: Attended) -> Pair:
    """By torch.func, and by autograd."""
    found = torch.func.grad(attended.loss, argnums=(0, 1, 2))(*attended.inputs)
    leaves = attended.leaves()
    return flat(found), flat(torch.autograd.grad(attended.loss(*leaves), leaves))


def jvp(attended: Attended) -> Pair:
    """u . J t by forward mode, and by backward."""
    tangents, leaves = attended.directions(), attended.leaves()
    output, moved = torch.func.jvp(attended, tuple(attended.inputs), tuple(tangents))
    weight = torch.randn_like(output)
    back = torch.autograd.grad((attended(*leaves) * weight).sum(), leaves)
    return (moved * weight).sum(), flat(back) @ flat(tangents)


def twice(attended: Attended) -> Pair:
    """The derivative of the gradient in a direction, by autograd and by a difference of gradients."""
    directions, leaves = attended.directions(), attended.leaves()
    first = torch.autograd.grad(attended.loss(*leaves), leaves, create_graph=True)
    found = torch.autograd.grad(flat(first) @ flat(directions), leaves)
    small = DIFFERENCE[leaves[0].dtype]
    ends = [
        [
            (x + sign * small * direction).requires_grad_()
            for x, direction in zip(attended.inputs, directions, strict=True)
        ]
        for sign in (1, -1)
    ]
    high, low = (flat(torch.autograd.grad(attended.loss(*end), end)) for end in ends)
    return flat(found), (high - low) / (2 * small)


TRANSFORMS: dict[str, Callable[[Attended], Pair]] = {
    "torch.vmap": vmap,
    "torch.func.grad": grad,
    "torch.func.jvp": jvp,
    "twice": twice,
}


def on_the_page(section: str) -> dict[str, list[str]]:
    """Rows of the table below a heading: yes or no for each transform."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## In {section}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \| (.*) \|$", text, re.MULTILINE)
    return {name: cells.split(" | ") for names, cells in rows for name in re.findall(r"`([\w-]+)`", names)}


@pytest.mark.parametrize("section", DTYPES)
def test_every_mechanism_is_on_the_page(section):
    assert set(on_the_page(section)) == set(attention.MECHANISMS)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("section", DTYPES)
@pytest.mark.parametrize("name", FIRST)
def test_a_transform_is_right_or_refused_as_the_page_says(name, section, transform):
    dtype = DTYPES[section]
    if dtype == torch.float32 and ops.native.why_unavailable() is not None:
        pytest.skip("no compiler: plain PyTorch computes, as in float64")
    torch.manual_seed(0)
    works = on_the_page(section)[name][list(TRANSFORMS).index(transform)]
    try:
        found, expected = TRANSFORMS[transform](Attended(FIRST[name], dtype))
    except REFUSALS:
        assert works == "no" or not IS_PINNED
    else:
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
        assert works == "yes" or not IS_PINNED


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_reference_takes_every_transform(transform):
    """In either precision: it is plain PyTorch."""
    attended = Attended(FIRST["linear"], torch.float64)
    attended.mechanism = lambda query, key, value, causal: (
        ops.linear_attention(query, key, value, power=2, causal=causal, offset=1.0, backend="reference").output
    )
    torch.testing.assert_close(*TRANSFORMS[transform](attended), **TOLERANCE[torch.float64])
