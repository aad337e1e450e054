"""Building mechanisms by name: what is refused, and how it is said."""

import pytest
import torch

from polysketch import attention
from polysketch.feature_maps import GaussianSketch, SRHTSketch


def test_an_unknown_mechanism_is_refused_with_the_list_of_those_that_exist():
    with pytest.raises(ValueError, match=r"'polysketsh'.*polynomial, polysketch, .*softmax"):
        attention.build("polysketsh", num_heads=2, head_dim=8)


def test_the_options_of_a_mechanism_are_its_constructors_own():
    assert attention.option_names("softmax") == ()
    assert attention.option_names("polynomial") == ("degree",)
    expected = {"degree", "sketch_size", "learned", "projection", "local_chunk", "share", "prefix_gain", "decay_gate"}
    assert set(attention.option_names("polysketch-paper")) == expected | {
        "hidden_size",
        "sketch_expansion",
        "sketch_depth",
        "sketch_activation",
        "redraw_interval",
    }


@pytest.mark.parametrize(("name", "meant"), [("polysketch-paper", "decay_gate"), ("polarity", "output_gate")])
def test_a_part_of_an_options_name_is_refused_with_the_whole_name(name: str, meant: str):
    with pytest.raises(ValueError, match=rf"has no option 'gate' \(is {meant} meant\?\); it takes"):
        attention.build(name, num_heads=2, head_dim=8, gate=True, hidden_size=4)


def test_a_mechanism_without_options_says_so():
    with pytest.raises(
        ValueError,
        match=r"'softmax' has no option 'degree' \(mechanisms that have it: polynomial, .*\); it takes no options",
    ):
        attention.build("softmax", num_heads=2, head_dim=8, degree=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"degree": 3}, "degree must be even"),
        ("polynomial", {"degree": 0}, "degree must be at least 1"),
        ("polysketch-paper", {"degree": 6}, "power of two, 4 or more, got 6"),
        ("polysketch-paper", {"degree": 2}, "power of two, 4 or more, got 2"),
        ("polysketch-paper", {"sketch_size": 0}, "sketch_size must be at least 1"),
        ("polysketch-paper", {"local_chunk": 0}, "local_chunk must be at least 1"),
        ("polysketch-paper", {"share": "model"}, "share must be one of 'layer', 'head', got 'model'"),
        ("polysketch-paper", {"projection": "fourier"}, "unknown projection 'fourier'; known projections: gaussian"),
        ("polysketch-paper", {"projection": "srht"}, "for the random sketch: it needs learned=False"),
        ("llops", {"degree": 0}, "degree must be at least 1"),
        ("llops", {"num_features": 0}, "num_features must be at least 1"),
        ("llops", {"normalize": True}, "weights of either sign, which may be zero: add nonnegative=True"),
        ("polysketch-paper", {"prefix_gain": 1.0}, "between 0 and 1, got 1.0"),
        ("polysketch-paper", {"prefix_gain": (0.5, 0.5, 0.5)}, "one per key/value head: 2, got 3"),
        ("polysketch-paper", {"prefix_gain": 0.5, "local_chunk": None}, "prefix_gain needs a local part"),
        ("polysketch-paper", {"decay_gate": True}, "decay_gate=True needs hidden_size"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        attention.build(name, num_heads=2, head_dim=8, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"degree": "4"}, "degree must be an integer, got '4'"),
        ("polysketch-paper", {"degree": 4.0}, "degree must be an integer"),
        ("polysketch-paper", {"local_chunk": True}, "local_chunk must be an integer"),
        ("polysketch-paper", {"sketch_size": 3.5}, "sketch_size must be an integer"),
        ("polysketch-paper", {"learned": "no"}, "learned must be True or False, got 'no'"),
        ("llops", {"rank": 1.5}, "rank must be an integer, got 1.5"),
        ("llops", {"normalize": 0}, "normalize must be True or False, got 0"),
        ("llops", {"nonnegative": "yes"}, "nonnegative must be True or False, got 'yes'"),
        ("polysketch-paper", {"decay_gate": 1}, "decay_gate must be True or False, got 1"),
        ("polysketch-paper", {"prefix_gain": ("a", 0.5)}, "must be a share of the attention mass, got 'a'"),
    ],
)
def test_options_of_another_type_are_refused(name: str, options: dict, message: str):
    with pytest.raises(TypeError, match=message):
        attention.build(name, num_heads=2, head_dim=8, **options)


@pytest.mark.parametrize(("projection", "sketch"), [("gaussian", GaussianSketch), ("srht", SRHTSketch)])
def test_a_projection_names_the_random_sketch(projection: str, sketch: type):
    options = {"learned": False, "projection": projection, "sketch_size": 5}
    mechanism = attention.build("polysketch-paper", num_heads=2, head_dim=8, **options)
    assert type(mechanism.feature_map) is sketch


@pytest.mark.parametrize("name", sorted(attention.MECHANISMS))
def test_mixed_dtypes_and_devices_are_refused_by_name(name: str):
    mechanism = attention.build(name, num_heads=2, head_dim=8)
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"share one dtype, got torch\.float64 and torch\.float32"):
        mechanism(query.double(), key, value)
    with pytest.raises(TypeError, match=r"must be floating .* got torch\.int32"):
        mechanism(query.int(), key.int(), value.int())
    with pytest.raises(ValueError, match="on one device, got meta, cpu, cpu"):
        mechanism(query.to("meta"), key, value)
    with pytest.raises(ValueError, match="on one device, got cpu, cpu, meta"):
        mechanism(query, key, value.to("meta"), causal=mechanism.is_causal)


@pytest.mark.parametrize("name", ["polynomial", "polysketch-paper"])
def test_inputs_wider_than_the_parameters_are_refused(name: str):
    mechanism = attention.build(name, num_heads=2, head_dim=8)
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"no wider than the mechanism's torch\.float32, got torch\.float64"):
        mechanism(query, key, value)
