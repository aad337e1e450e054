"""What is drawn are the weights of the mechanisms: each sees what the page of pictures says that it sees."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import draw_attention  # noqa: E402 - a script, not a package

LENGTH = draw_attention.LENGTH
ROW, COLUMN = torch.meshgrid(torch.arange(LENGTH), torch.arange(LENGTH), indexing="ij")
SEEN = {
    "softmax": COLUMN <= ROW,
    "linear": COLUMN <= ROW,
    "sliding-window": (COLUMN <= ROW) & (COLUMN > ROW - 16),
    "local": (COLUMN <= ROW) & (COLUMN // 16 == ROW // 16),
    "polysketch-paper": COLUMN <= ROW,
    "polysketch": COLUMN <= ROW,
}


@pytest.fixture(scope="module")
def shares() -> dict[str, torch.Tensor]:
    """The weights of every mechanism that is drawn."""
    query, key = draw_attention.some_queries_and_keys()
    made = {name: draw_attention.build(name, options) for name, options in draw_attention.SEEN.items()}
    return {name: draw_attention.weights(mechanism, query, key) for name, mechanism in made.items()}


@pytest.mark.parametrize("name", draw_attention.SEEN)
def test_no_weight_stands_where_a_mechanism_does_not_look(shares, name):
    """And some do wherever it does; the window and the chunk have their size."""
    assert shares[name][~SEEN[name]].abs().max() < 1e-6
    assert (shares[name][SEEN[name]].abs() > 0).float().mean() > 0.95


def test_the_weights_of_softmax_are_its_formula(shares):
    query, key = draw_attention.some_queries_and_keys()
    scores = (query @ key.mT / draw_attention.HEAD_DIM**0.5)[0, 0]
    expected = scores.masked_fill(COLUMN > ROW, float("-inf")).softmax(-1)
    torch.testing.assert_close(shares["softmax"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "linear", "polysketch-paper", "polysketch"])
def test_the_token_that_resembles_stands_out(shares, name):
    """40 tokens back there is more than at 39 and 41: the second diagonal of the picture."""
    like, others = (torch.diagonal(shares[name], -offset)[20:].mean() for offset in (40, 39))
    assert like > 1.05 * others


def test_states_have_the_size_that_the_page_says():
    """Softmax's grows with the position, the others' do not."""
    for name, options in draw_attention.REMEMBERED.items():
        sizes = draw_attention.state_bytes(draw_attention.build(name, options), (256, 512, 1024))
        assert (sizes[2] > 3 * sizes[0]) if name == "softmax" else len(set(sizes)) == 1


def test_the_script_writes_both_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draw_attention.py", "--out", str(tmp_path)])
    draw_attention.main()
    assert {file.name for file in tmp_path.glob("*.png")} == {"what-attention-sees.png", "memory-by-position.png"}
