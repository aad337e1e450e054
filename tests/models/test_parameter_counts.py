"""Sizes of the models of PolySketchFormer, appendix H, within one per cent."""

import pytest
import torch

from polysketch.models import TransformerLM, preset

LOCAL, NO_LOCAL = {"local_chunk": 1024}, {"local_chunk": None}
RANDOM = {"learned": False}
APPENDIX_H = [
    ("gpt2-small-paper", 12, "softmax", {}, 110),
    *(("gpt2-small-paper", 12, "polynomial", {"degree": degree}, 110) for degree in (2, 4, 8)),
    *(("gpt2-small-paper", 12, "polysketch-paper", {"sketch_size": 64, **part}, 113) for part in (LOCAL, NO_LOCAL)),
    *(("gpt2-small-paper", 12, "polysketch-paper", {"sketch_size": 32, **part}, 111) for part in (LOCAL, NO_LOCAL)),
    *(("gpt2-small-paper", 13, "polysketch-paper", {"sketch_size": 64, **part}, 120) for part in (LOCAL, NO_LOCAL)),
    *(("gpt2-small-paper", 13, "polysketch-paper", {"sketch_size": 32, **part}, 118) for part in (LOCAL, NO_LOCAL)),
    *(
        ("gpt2-small-paper", 13, "polysketch-paper", {"sketch_size": size, **RANDOM, **part}, 117)
        for size in (32, 64)
        for part in (LOCAL, NO_LOCAL)
    ),
    ("gpt2-medium-paper", 24, "softmax", {}, 337),  # the recipe gives 335
    ("gpt2-medium-paper", 24, "polynomial", {"degree": 8}, 337),
    ("gpt2-medium-paper", 24, "polysketch-paper", {"sketch_size": 64}, 341),
    ("gpt2-medium-paper", 24, "polysketch-paper", {"sketch_size": 32}, 337),
    ("gpt2-medium-paper", 26, "polysketch-paper", {"sketch_size": 64}, 367),
    ("gpt2-medium-paper", 26, "polysketch-paper", {"sketch_size": 32}, 362),
    ("gpt2-large-paper", 36, "softmax", {}, 748),
    ("gpt2-large-paper", 36, "polynomial", {"degree": 4}, 748),
    ("gpt2-large-paper", 39, "polysketch-paper", {"sketch_size": 64}, 817),
    ("gpt2-large-paper", 39, "polysketch-paper", {"sketch_size": 32}, 811),
]


ALWAYS_SMALL = [
    pytest.param(*model, marks=[pytest.mark.full] * (model[0] != "gpt2-small-paper")) for model in APPENDIX_H
]


def millions(name: str, **changes) -> float:
    with torch.device("meta"):
        return TransformerLM(preset(name, **changes)).num_parameters() / 1e6


@pytest.mark.parametrize(("name", "layers", "attention", "options", "expected"), ALWAYS_SMALL)
def test_models_have_the_parameters_of_appendix_h(name, layers, attention, options, expected):
    found = millions(name, num_layers=layers, attention=attention, attention_options=options)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("name", "expected"), [("tiny", 0.85), ("mini", 10)])
def test_small_presets_have_the_sizes_that_the_documents_say(name: str, expected: float):
    assert millions(name) == pytest.approx(expected, rel=0.05)


def test_the_based_hybrid_has_the_parameters_of_its_parts():
    """Tied embedding, gated units of 2 d, 17 convolutions, 5 linear and 5 windowed layers, as published: 363M."""
    width, heads, head_dim, features, vocabulary = 1024, 16, 64, 16, 50_257
    units = 27 * 3 * width * 2 * width
    convolutions = 17 * (4 * width**2 + 4 * width + 2 * width * 3 + 2 * width**2 + width)
    windows = 5 * 4 * width**2
    published_linear = 5 * (2 * width * heads * features + 2 * width**2)
    published = vocabulary * width + units + convolutions + windows + published_linear
    assert published / 1e6 == pytest.approx(362.5, abs=0.1)
    ours_linear = 5 * (4 * width**2 + 2 * heads * head_dim * features)  # heads of 64, then the projections
    norms = (2 * 27 + 1) * 2 * width
    expected = published - published_linear + ours_linear + norms + vocabulary  # and an output bias
    assert millions("based-360m") * 1e6 == expected


def test_the_based_presets_have_the_published_pattern():
    names = [name for name, _ in preset("based-360m").layers()]
    assert [index for index, name in enumerate(names) if name == "based"] == [1, 6, 11, 16, 21]
    assert [index for index, name in enumerate(names) if name == "sliding-window"] == [2, 7, 12, 17, 22]
    assert names.count("short-convolution") == 17
    assert [name for name, _ in preset("based-tiny").layers()] == names[:5]
    assert millions("based-tiny") == pytest.approx(1, rel=0.1)
