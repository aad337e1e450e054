"""Window dropout: which steps drop their windows, and that nothing but steps does."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from polysketch import replace_attention
from polysketch.conversion import ConversionConfig, convert
from polysketch.conversion.window_dropout import WindowDropout
from polysketch.integrations.replacement import load_replaced, replaced_mechanisms


@pytest.fixture
def model(softmax_model):
    return replace_attention(AutoModelForCausalLM.from_pretrained(softmax_model), "polysketch", window=16)


def windows(model) -> list[int]:
    return [mechanism.window for mechanism in replaced_mechanisms(model).values()]


def test_steps_drop_windows_less_and_less_often(model):
    dropout, dropped = WindowDropout(model, 0.8, seed=0), []
    for step in range(1000):
        dropout.begin_step(step, step / 1000)
        assert windows(model) in ([16, 16], [2, 2])
        dropped.append(windows(model) == [2, 2])
    first, second = sum(dropped[:500]), sum(dropped[500:])
    assert 250 < first < 350  # 0.6 of them on average
    assert 60 < second < 140  # 0.2
    dropout.end_step()
    assert windows(model) == [16, 16]


def test_a_step_draws_by_itself(model):
    """So that a conversion that was killed goes on with the same steps."""
    found = []
    for steps in (range(50), reversed(range(50))):
        dropout = WindowDropout(model, 0.5, seed=1)
        drawn = {}
        for step in steps:
            dropout.begin_step(step, 0.0)
            drawn[step] = windows(model)
        dropout.end_step()
        found.append(drawn)
    assert found[0] == found[1]
    assert len({tuple(x) for x in found[0].values()}) == 2


def test_without_a_window_there_is_nothing_to_drop(options, tmp_path):
    """Told before the first step; and a share is a share."""
    config = ConversionConfig(**options, window_dropout=0.5, out=tmp_path)
    with pytest.raises(ValueError, match="--window-dropout: no mechanism of the model has a window"):
        convert(config, progress=False)
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="--window-dropout"):
            ConversionConfig(**options, window_dropout=share, out=tmp_path)


def test_it_changes_what_is_learned_and_not_the_model_that_is_saved(options, tmp_path):
    few = {"transfer_steps": 1, "tuning_steps": 2, "eval_tokens": 64}
    config = ConversionConfig(
        **{**options, **few, "attention": "polysketch", "attention_options": {"window": 8}}, out=tmp_path
    )
    found = []
    for share in (0.0, 1.0):
        out = tmp_path / str(share)
        result = convert(dataclasses.replace(config, window_dropout=share, out=out), progress=False)
        model = load_replaced(result.folder / "model")
        assert windows(model) == [8, 8]
        found.append(model.get_input_embeddings().weight)
    assert not torch.equal(*found)
