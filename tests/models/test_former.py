"""Configurations of an earlier version name the mechanisms that they meant."""

import pytest

from polysketch.models.former import (
    attention_of_format,
    mechanism_of_format,
    model_of_format,
    training_of_format,
)

PLAIN = {"projection_convolution": 0, "query_key_norm": False, "head_gate": False, "input_positions": True}


@pytest.mark.parametrize(
    ("then", "now", "options"),
    [
        ("polysketch", "polysketch-paper", {}),
        ("polysketch-delta", "polysketch", {"sketch_size": 24}),
        ("polysketch-heavy", "polysketch-heavy", {}),
    ],
)
def test_a_name_of_then_is_one_of_today(then: str, now: str, options: dict):
    assert mechanism_of_format(1, then, {"window": 3}) == (now, {**options, "window": 3})
    assert attention_of_format(1, {"attention": then, "attention_options": {"window": 3}}) == {
        "attention": now,
        "attention_options": {**options, "window": 3},
    }


def test_patterns_are_renamed_wherever_they_stand():
    then = {
        "attention": ["polysketch", "softmax", "polysketch-delta"],
        "attention_options": {"polysketch": {"degree": 2}, "polysketch-delta": {"window": 3}},
        "rotary": ["polysketch", "softmax"],
        "num_layers": 3,
    }
    assert attention_of_format(1, then) == {
        "attention": ["polysketch-paper", "softmax", "polysketch"],
        "attention_options": {"polysketch-paper": {"degree": 2}, "polysketch": {"sketch_size": 24, "window": 3}},
        "rotary": ["polysketch-paper", "softmax"],
        "num_layers": 3,
    }


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"attention": "polysketch"}, {"sketch_size": 24}),
        ({"attention": "polysketch", "attention_options": {"sketch_size": 8}}, {"sketch_size": 8}),
        ({"attention": ["softmax", "polysketch"], "attention_options": {}}, {"polysketch": {"sketch_size": 24}}),
        ({"attention": "softmax", "attention_options": {}}, {}),
    ],
)
def test_sketches_of_format_2_are_as_wide_as_they_were(then: dict, now: dict):
    assert attention_of_format(2, then) == model_of_format(2, then) == {**then, "attention_options": now}
    assert attention_of_format(3, then) == model_of_format(3, then) == then
    assert mechanism_of_format(3, "polysketch", {}) == ("polysketch", {})


@pytest.mark.parametrize("missing", [{}, {"attention": None, "projection_convolution": None, "query_key_norm": None}])
def test_what_had_another_default_is_said(missing: dict):
    assert model_of_format(1, {"num_layers": 2, **missing}) == {
        "num_layers": 2,
        "attention": "polysketch-paper",
        "attention_options": {},
        **PLAIN,
    }


def test_what_was_said_stays():
    then = {"attention": "softmax", "rotary": False, "projection_convolution": 4, "query_key_norm": True}
    assert model_of_format(1, then) == {**then, "attention_options": {}, "head_gate": False, "input_positions": True}


def test_what_a_training_left_to_its_preset_is_as_in_its_model():
    training = {"attention": "polysketch", "projection_convolution": None, "head_gate": None, "steps": 3}
    found = training_of_format(1, training, {"projection_convolution": 3, "input_positions": False})
    expected = {**PLAIN, "projection_convolution": 3, "input_positions": False}
    assert found == {"attention": "polysketch-paper", "attention_options": {}, "steps": 3, **expected}


@pytest.mark.parametrize("model", [{}, {"head_gate": False}])
def test_presets_of_format_3_had_no_gates_of_heads(model: dict):
    training = {"attention": "softmax", "attention_options": {}, "query_key_norm": None, "head_gate": None}
    assert training_of_format(3, training, model) == {**training, "head_gate": False}
    assert training_of_format(3, training, {"head_gate": True}) == {**training, "head_gate": True}
    assert training_of_format(3, {**training, "head_gate": True}, {}) == {**training, "head_gate": True}
    assert training_of_format(4, training, model) == training
