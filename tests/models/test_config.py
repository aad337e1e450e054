"""The configuration: what it fills in, refuses, and writes down; and the presets' sizes."""

import json

import pytest

from polysketch import attention
from polysketch.models import (
    PRESETS,
    ModelConfig,
    TransformerEncoder,
    TransformerEncoderDecoder,
    TransformerLM,
    preset,
    preset_attention,
)
from polysketch.models.answering import encoder_preset


def config(**changes) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 50, "num_layers": 2, "hidden_size": 16, "num_heads": 2, **changes})


@pytest.mark.parametrize("model", [TransformerLM, TransformerEncoder, TransformerEncoderDecoder])
def test_a_model_is_made_of_a_configuration(model: type):
    with pytest.raises(TypeError, match=r"must be a \w+Config, got dict$"):
        model({"vocab_size": 50})
    with pytest.raises(
        TypeError,
        match=r"got str: polysketch\.models\.preset\('tiny'\) is one" if model is TransformerLM else "got str$",
    ):
        model("tiny")


def test_sizes_left_out_are_filled_in():
    filled = config()
    assert (filled.head_dim, filled.num_kv_heads, filled.feedforward_size) == (8, 2, 40)
    assert filled.attention == "polysketch"
    assert config(head_dim=4, num_kv_heads=1, feedforward_size=7).head_dim == 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "polynomial", "attention_options": {"degree": 2}},
        {"attention": ("softmax", "polysketch-paper"), "attention_options": ({}, {"prefix_gain": (0.5, 0.9)})},
        {"attention": ("based", "local"), "attention_options": {"local": {"local_chunk": 4}}, "num_layers": 4},
        {"rotary": ("polysketch",), "input_positions": False},
        {"attention": ["short-convolution", "based"], "rotary": False},
        {"rope_base": 500000, "norm_epsilon": 1e-6, "num_kv_heads": 1},
        {"projection_convolution": 4, "query_key_norm": True, "head_gate": True},
        {"attention_every": 2},
    ],
)
def test_a_configuration_survives_json(changes: dict):
    original = config(**changes)
    again = ModelConfig.from_dict(json.loads(json.dumps(original.to_dict())))
    assert again.to_dict() == original.to_dict()
    assert [name for name, _ in again.layers()] == [name for name, _ in original.layers()]


def test_each_layer_may_have_its_own_mechanism():
    mixed = config(attention=["softmax", "polynomial"], attention_options=[{}, {"degree": 8}])
    assert mixed.layers() == [("softmax", {}), ("polynomial", {"degree": 8})]
    assert config(attention="softmax").layers() == [("softmax", {}), ("softmax", {})]


def test_a_pattern_repeats_over_the_layers_with_options_by_name():
    options = {"sliding-window": {"window": 7}}
    mixed = config(num_layers=6, attention=["based", "sliding-window", "based"], attention_options=options)
    assert mixed.layers() == [("based", {}), ("sliding-window", {"window": 7}), ("based", {})] * 2
    assert mixed.to_dict()["attention"] == ["based", "sliding-window", "based"]


def test_a_pattern_of_options_repeats_by_itself():
    options = ({"degree": 2}, {"degree": 4})
    mixed = config(num_layers=4, attention="polynomial", attention_options=options)
    assert mixed.layers() == [("polynomial", {"degree": degree}) for degree in (2, 4, 2, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_layers": -1}, "num_layers must be at least 1"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"num_heads": 3}, "hidden_size must be a multiple of num_heads, got 16 and 3"),
        ({"head_dim": 5}, "head_dim must be even, for positions are pairs, got 5"),
        ({"hidden_size": 15, "head_dim": 4}, "hidden_size must be even"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"feedforward_size": 0}, "feedforward_size must be at least 1"),
        ({"rope_base": 0}, "rope_base must be positive and finite, got 0"),
        ({"rope_base": float("nan")}, "rope_base must be positive and finite"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon must be positive"),
        ({"projection_convolution": -1}, "projection_convolution must be a number of taps, or 0 for none, got -1"),
        ({"attention": "no-such"}, "unknown attention mechanism 'no-such'; known mechanisms: .*polynomial"),
        ({"attention": ("softmax",) * 3}, "attention must be one, one per layer, or a pattern .*: 2 layers, got 3"),
        ({"attention": ("softmax",) * 4}, "2 layers, got 4"),
        ({"attention": ()}, "2 layers, got 0"),
        ({"attention_options": ({},) * 3}, "attention_options must be one, one per layer, or .*: 2 layers, got 3"),
        ({"attention": ("softmax",), "attention_options": {"degree": 2}}, "go by name, {'softmax': .* is 'degree'"),
        (
            {"attention": ("softmax",), "attention_options": {"based": {}}},
            "no layer is 'based'; the layers are softmax",
        ),
        ({"attention": ["softmax", "based"], "attention_options": {"based": {"window": 2}}}, "'based' has no option"),
        ({"rotary": ("softmax",)}, "rotary names 'softmax', and no layer is one; the layers are polysketch"),
        ({"attention": "nystrom"}, "'nystrom' cannot be causal, .*; causal mechanisms: softmax, .*, polarity$"),
        ({"attention": ("softmax", "skyformer")}, "'skyformer' cannot be causal"),
        ({"attention_options": {"sketchsize": 3}}, "'polysketch' has no option 'sketchsize'; it takes window"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "50"}, "vocab_size must be an integer, got '50'"),
        ({"num_layers": True}, "num_layers must be an integer"),
        ({"head_dim": 8.0}, "head_dim must be an integer"),
        ({"rope_base": "big"}, "rope_base must be a number"),
        ({"rotary": "softmax"}, "rotary must be true, false, or a list of mechanisms, got 'softmax'"),
        ({"input_positions": 1}, "input_positions must be true or false, got 1"),
        ({"projection_convolution": True}, "projection_convolution must be an integer, its number of taps, got True"),
        ({"projection_convolution": 4.0}, "projection_convolution must be an integer"),
        ({"query_key_norm": "layer"}, "query_key_norm must be true or false, got 'layer'"),
        ({"head_gate": None}, "head_gate must be true or false, got None"),
        ({"attention": 3}, "attention must be a str, or a list of them to repeat over the layers, got 3"),
        ({"attention": ("softmax", 3)}, "attention must be a str, or a list of them"),
        ({"attention": ("based",), "attention_options": {"based": 3}}, "of 'based' must be a dict, got 3"),
        ({"attention_options": ({}, 3)}, "attention_options must be a dict, or a list of them"),
        ({"attention_options": "degree"}, "attention_options must be a dict"),
    ],
)
def test_values_of_another_type_are_refused(changes: dict, message: str):
    with pytest.raises(TypeError, match=message):
        config(**changes)


def test_a_mechanism_in_every_few_layers_ends_with_the_last_and_windows_stand_between():
    def at(layers: int, every: int, name: str = "polysketch", **options: int) -> list:
        return config(num_layers=layers, attention=name, attention_options=options, attention_every=every).layers()

    window, ours = ("sliding-window", {"window": 9}), ("polysketch", {"window": 9})
    assert at(6, 4, window=9) == [window, ours, window, window, window, ours]
    assert at(2, 4, window=9) == [window, ours]
    assert at(2, 1, window=9) == [ours, ours]
    assert at(2, 2, "softmax") == [("sliding-window", {"window": 256}), ("softmax", {})]
    assert at(2, 2)[0][1]["window"] == attention.build("polysketch", num_heads=2, head_dim=4).window


def test_every_few_layers_is_of_one_mechanism():
    with pytest.raises(
        ValueError, match="attention_every expects one mechanism, got the pattern based, softmax: write"
    ):
        config(num_layers=4, attention=("based", "softmax"), attention_every=2)
    with pytest.raises(ValueError, match="attention_every must be at least 1, got 0"):
        config(attention_every=0)


def test_unknown_and_missing_keys_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown model option 'hiden_size', 'depth'; known: vocab_size"):
        ModelConfig.from_dict({**config().to_dict(), "hiden_size": 8, "depth": 2})
    with pytest.raises(ValueError, match="needs num_layers, num_heads"):
        ModelConfig.from_dict({"vocab_size": 3, "hidden_size": 4})


def test_a_configuration_from_before_anything_stood_around_attention_is_one_without():
    saved = preset("based-tiny").to_dict()
    for name in ("projection_convolution", "query_key_norm", "head_gate"):
        del saved[name]
    assert ModelConfig.from_dict(saved) == preset("based-tiny")
    assert (preset("based-tiny").projection_convolution, preset("based-tiny").head_gate) == (0, False)


def test_presets_have_a_convolution_norms_and_gates_around_attention_and_the_papers_models_have_not():
    tiny, paper = preset("tiny"), preset("gpt2-small-paper")
    around = ("projection_convolution", "query_key_norm", "head_gate", "input_positions")
    assert [getattr(tiny, name) for name in around] == [4, True, True, False]
    assert [getattr(paper, name) for name in around] == [0, False, False, True]
    assert not encoder_preset("tiny").head_gate  # what gates are worth to encoders was not measured
    assert paper.layers() == [("polysketch-paper", {})] * 12


def test_a_preset_has_its_mechanism_in_every_second_layer_and_one_asked_for_by_name_in_all():
    def names(**changes) -> list[str]:
        return [name for name, _ in preset("tiny", **changes).layers()]

    window = "sliding-window"
    assert names() == [window, "polysketch"] * 2
    assert names(num_layers=2) == [window, "polysketch"]
    assert names(attention="polysketch") == ["polysketch"] * 4
    assert names(attention="softmax") == ["softmax"] * 4
    assert names(attention="softmax", attention_every=2) == [window, "softmax"] * 2
    assert {name for name, _ in preset("based-tiny").layers()} == {"short-convolution", "based", window}
    assert preset("gpt2-small-paper").attention_every == 1


def test_a_configuration_from_before_the_gates_had_names_says_what_to_write():
    saved = preset("gpt2-small-paper").to_dict() | {"attention_options": {"gate": True}}
    with pytest.raises(ValueError, match=r"'polysketch-paper' has no option 'gate' \(is decay_gate meant\?\)"):
        ModelConfig.from_dict(saved)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(AttributeError):
        config().hidden_size = 3


def test_unknown_presets_and_changes_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="unknown preset 'gpt3'; known presets: gpt2-small"):
        preset("gpt3")
    with pytest.raises(ValueError, match="unknown model option 'layers'"):
        preset("tiny", layers=3)


def test_another_mechanism_than_the_presets_takes_its_own_options_and_positions():
    changed = preset("based-tiny", attention="softmax")
    assert changed.layers() == [("softmax", {})] * 5
    assert (changed.rotary, changed.input_positions) == (True, False)
    same = preset("based-tiny", attention=list(preset("based-tiny").attention), num_layers=10)
    assert same.layers() == preset("based-tiny").layers() * 2
    assert same.rotary == ("sliding-window",)


def test_the_presets_own_mechanism_is_given_with_some_options_changed():
    assert preset_attention("tiny", {"degree": 2}) == ("polysketch", {"degree": 2})
    attention, options = preset_attention("based-tiny", {"sliding-window": {"window": 3}, "short-convolution": {}})
    assert attention == preset("based-tiny").attention
    assert options == {"based": {"feature_dim": 16}, "sliding-window": {"window": 3}, "short-convolution": {}}
    assert preset_attention("based-tiny", [{}])[1] == [{}]
    assert preset("based-tiny").layers()[2] == ("sliding-window", {"window": 64})
    with pytest.raises(TypeError, match="must be a dict, got 3"):
        preset("based-tiny", attention_options=preset_attention("based-tiny", {"based": 3})[1])
    with pytest.raises(ValueError, match="unknown preset 'gpt3'"):
        preset_attention("gpt3", {})


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"tasks-paper", "arena-paper", "reversal-paper"}))
def test_every_preset_has_heads_of_64_but_those_of_the_papers_tasks(name: str):
    assert preset(name).head_dim == 64


def test_the_models_of_the_papers_tasks_have_the_published_sizes():
    """PolySketchFormer, appendix F: 2 layers, 8 heads of 16. Nystromformer's lra_config.py: 2 layers, 2 heads of 32."""
    sizes = [
        (one.num_layers, one.num_heads, one.head_dim, one.hidden_size)
        for one in (preset("tasks-paper"), preset("arena-paper"))
    ]
    assert sizes == [(2, 8, 16, 128), (2, 2, 32, 64)]
    assert preset("arena-paper").feedforward_size == 128
    reversal = preset("reversal-paper")  # the thesis, chapter 5: an embedding of 32, one head
    assert (reversal.num_layers, reversal.num_heads, reversal.hidden_size) == (1, 1, 32)
    assert (reversal.input_positions, reversal.rotary, reversal.projection_convolution) == (True, False, 0)
