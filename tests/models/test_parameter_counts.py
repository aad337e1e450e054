"""Sizes of the models of PolySketchFormer, appendix H, within one per cent."""

import pytest
import torch

from polysketch.models import TransformerLM, preset

LOCAL, NO_LOCAL = {"local_chunk": 1024}, {"local_chunk": None}
RANDOM = {"learned": False}
APPENDIX_H = [
    ("gpt2-small", 12, "softmax", {}, 110),
    *(("gpt2-small", 12, "polynomial", {"degree": degree}, 110) for degree in (2, 4, 8)),
    *(("gpt2-small", 12, "polysketch", {"sketch_size": 64, **part}, 113) for part in (LOCAL, NO_LOCAL)),
    *(("gpt2-small", 12, "polysketch", {"sketch_size": 32, **part}, 111) for part in (LOCAL, NO_LOCAL)),
    *(("gpt2-small", 13, "polysketch", {"sketch_size": 64, **part}, 120) for part in (LOCAL, NO_LOCAL)),
    *(("gpt2-small", 13, "polysketch", {"sketch_size": 32, **part}, 118) for part in (LOCAL, NO_LOCAL)),
    *(
        ("gpt2-small", 13, "polysketch", {"sketch_size": size, **RANDOM, **part}, 117)
        for size in (32, 64)
        for part in (LOCAL, NO_LOCAL)
    ),
    ("gpt2-medium", 24, "softmax", {}, 337),  # the recipe gives 335
    ("gpt2-medium", 24, "polynomial", {"degree": 8}, 337),
    ("gpt2-medium", 24, "polysketch", {"sketch_size": 64}, 341),
    ("gpt2-medium", 24, "polysketch", {"sketch_size": 32}, 337),
    ("gpt2-medium", 26, "polysketch", {"sketch_size": 64}, 367),
    ("gpt2-medium", 26, "polysketch", {"sketch_size": 32}, 362),
    ("gpt2-large", 36, "softmax", {}, 748),
    ("gpt2-large", 36, "polynomial", {"degree": 4}, 748),
    ("gpt2-large", 39, "polysketch", {"sketch_size": 64}, 817),
    ("gpt2-large", 39, "polysketch", {"sketch_size": 32}, 811),
]


def millions(name: str, **changes) -> float:
    with torch.device("meta"):
        return TransformerLM(preset(name, **changes)).num_parameters() / 1e6


@pytest.mark.parametrize(("name", "layers", "attention", "options", "expected"), APPENDIX_H)
def test_models_have_the_parameters_of_appendix_h(name, layers, attention, options, expected):
    found = millions(name, num_layers=layers, attention=attention, attention_options=options)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("name", "expected"), [("tiny", 1), ("mini", 10)])
def test_small_presets_have_about_one_and_ten_million(name: str, expected: float):
    assert millions(name) == pytest.approx(expected, rel=0.15)
