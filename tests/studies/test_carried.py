"""The experiment on carried states: both ways are trained and measured on the same tokens, by position."""

import json

import numpy as np
import pytest
import torch

from polysketch.cli import main
from polysketch.models import ModelConfig, TransformerLM
from polysketch.studies.carried import CARRIED, by_position, long_documents
from polysketch.studies.study import Verdict


def test_both_ways_are_trained_measured_and_timed(folder, books):
    assert main(["study", "carried-state", "--threads", "1", "--seeds", "0", "1"]) == 0
    runs = folder / "runs/studies/carried-state-smoke"
    for way in ("carried", "rows-apart"):
        record = json.loads((runs / "results" / f"{way}-seed1.json").read_text())
        assert len(record["losses"]) == 2
        assert ("cost" in record) == (way == "carried")
        (config,) = runs.glob(f"{way}-seed1-*/run/config.json")
        assert json.loads(config.read_text())["training"]["carry_state"] == (way == "carried")
    cost = json.loads((runs / "results/carried-seed0.json").read_text())["cost"]
    assert cost["ratio"] > 0
    assert len(cost["seconds"]["carried"]) == CARRIED.sizes["smoke"].timed_steps


def test_the_claim_is_judged_by_differences_of_the_same_seed_at_the_furthest_positions():
    def record(row: str, seed: int, last: float) -> dict:
        return {"row": row, "seed": seed, "losses": [9.0 * (row == "carried"), last]}

    records = [record("rows-apart", 0, 3.0), record("rows-apart", 1, 5.0), record("rows-apart", 2, 1.0)]
    records += [record("carried", 1, 4.5), record("carried", 0, 3.1)]
    assert CARRIED.judge(records) == Verdict("-0.200 nats (-0.500 to +0.100)", True)
    assert CARRIED.judge(records[:3]).holds is None


def test_losses_are_those_of_documents_from_their_beginnings(prepared):
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "num_layers": 1, "hidden_size": 16, "num_heads": 1}
    model = TransformerLM(ModelConfig(**sizes, attention="polysketch", attention_options={"window": 4}))
    (document,) = long_documents(prepared, 60, 3)
    assert len(document) == 61
    ids = torch.from_numpy(document.astype(np.int64))[None]
    with torch.no_grad():
        losses = model.token_losses(model.hidden_states(ids[:, :-1]), ids[:, 1:].contiguous())[0].double()
    expected = [float(losses[:10].mean()), float(losses[10:].mean())]
    np.testing.assert_allclose(by_position(model, [document], (0, 10, 60)), expected, rtol=1e-4)


def test_a_text_without_long_documents_is_refused(prepared):
    with pytest.raises(
        ValueError, match="expected a document of more than 100000 tokens in the test split, found none"
    ):
        long_documents(prepared, 100_000, 2)
