"""What the benchmarks return: every case once, medians and ratios of the single times, floors, plots, records."""

import dataclasses
import json
import statistics

import pytest
import torch

from polysketch.attention import KeyValueState
from polysketch.benchmarking import (
    AttentionSettings,
    DecodingSettings,
    PicturesSettings,
    TrainingSettings,
    record,
    time_attention,
    time_decoding,
    time_pictures,
    time_training,
)
from polysketch.benchmarking.models import attention_states, build_model, read_bytes, state_at
from polysketch.benchmarking.plot import plot_time_per_token
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.way_names import Sizes
from polysketch.benchmarking.ways import way

WAYS = ("sdpa", "given", "learned", "random", "polynomial")
ATTENTION = AttentionSettings(lengths=(64, 128), mechanisms=WAYS, heads=2, local=16)
TRAINING = TrainingSettings(preset="tiny", models=("learned", "polynomial"), contexts=(48,), batch=2, local=16)
DECODING = DecodingSettings(preset="tiny", models=("learned", "random"), positions=(40,), local=16)
ENCODER = AttentionSettings(
    lengths=(64, 128), mechanisms=("given", "learned", "softmax"), heads=2, local=16, bidirectional=True
)
PICTURES = PicturesSettings(preset="tiny", models=("learned",), image_sizes=(32,), patch=4, local=16)
BENCHMARKS = {
    "attention": (time_attention, ATTENTION, "sdpa"),
    "encoder": (time_attention, ENCODER, "sdpa"),
    "pictures": (time_pictures, PICTURES, "softmax"),
    "training": (time_training, TRAINING, "softmax"),
    "decoding": (time_decoding, DECODING, "softmax"),
}


@pytest.fixture(scope="module", params=BENCHMARKS)
def measured(request):
    """(measurements, title of the baseline, settings) of every benchmark."""
    from polysketch.benchmarking import Workbench
    from polysketch.benchmarking.timing import Rates

    measure, settings, baseline = BENCHMARKS[request.param]
    bench = Workbench(clock=Clock(torch.device("cpu")), rates=Rates(1e11, 1e10), repeats=2)
    return measure(bench, settings), baseline, settings, bench


def test_every_measurement_has_times_a_ratio_and_a_floor(measured):
    measurements, *_ = measured
    for one in measurements:
        assert one["seconds"] > 0
        assert len(one["all_seconds"]) == 2
        assert one["floor_seconds"] == max(one["operations"] / 1e11, one["bytes"] / 1e10) > 0
        assert one["ratio"] > 0


def test_the_baseline_comes_first_at_every_place_with_a_ratio_of_one(measured):
    measurements, baseline, *_ = measured
    places = [one.get("length") or one["position"] for one in measurements]
    for place in dict.fromkeys(places):
        first = measurements[places.index(place)]
        assert first["series"] == baseline
        assert first["ratio"] == 1


def test_the_record_is_json_with_machine_versions_commit_threads_settings_and_all_times(measured):
    measurements, _, settings, bench = measured
    found = json.loads(json.dumps(record("name", bench, settings, measurements)))
    assert {"device", "cores", "threads", "torch", "python", "commit", "source_sha256"} <= set(found["environment"])
    assert found["settings"] == json.loads(json.dumps(dataclasses.asdict(settings)))
    assert found["measurements"] == json.loads(json.dumps(measurements))
    assert found["dtype"] == "float32"
    assert found["seconds"] > 0


def test_all_series_of_a_direction_are_drawn_in_one_picture(measured, tmp_path):
    plot_time_per_token(measured[0], "title", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for series in {one["series"] for one in measured[0]}:
        assert f"<!-- {series} -->" in drawn


def test_every_direction_has_a_panel_and_no_panel_is_empty(tmp_path):
    one = {"series": "a", "length": 64, "tokens": 64, "seconds": 2.0, "floor_seconds": 1.0}
    plot_time_per_token([{**one, "direction": f"panel {n}"} for n in range(5)], "title", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('<g id="axes_') == 5
    assert all(f"<!-- panel {n} -->" in drawn for n in range(5))


def test_every_length_and_variant_is_timed_once(bench):
    found = time_attention(bench, ATTENTION)
    expected = [(length, way(name, Sizes()).title) for length in ATTENTION.lengths for name in WAYS]
    assert [(one["length"], one["series"]) for one in found] == expected


def test_a_time_is_the_median_and_a_ratio_compares_neighbours(bench, monkeypatch):
    times = {"sdpa": [4.0, 8.0, 30.0], "given": [1.0, 4.0, 2.0]}
    monkeypatch.setattr(Clock, "alternate", lambda *_, **__: times)
    baseline, one = time_attention(bench, AttentionSettings(lengths=(64,), mechanisms=("given",), heads=2, local=16))
    assert baseline["seconds"] == 8
    assert one["seconds"] == statistics.median(times["given"]) == 2
    assert one["ratio"] == 4
    assert one["tokens_per_second"] == 32


@pytest.mark.full  # test_instruments.py looks at the probe
def test_peak_memory_is_measured_when_it_is_asked_for(bench):
    small = dataclasses.replace(ATTENTION, lengths=(512,), mechanisms=("given",), memory=True)
    assert all(one["peak_bytes"] >= 0 for one in time_attention(bench, small))
    assert time_attention(bench, dataclasses.replace(small, memory=False))[0]["peak_bytes"] is None


@pytest.mark.full
def test_peak_memory_of_a_step_is_that_of_its_process(bench):
    step = time_training(bench, dataclasses.replace(TRAINING, models=(), memory=True))
    assert 5e7 < step[0]["peak_bytes"] < 5e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "lengths of at least 1, found none"),
        ({"lengths": (64, 0)}, r"lengths of at least 1, found \(64, 0\)"),
        ({"heads": 0}, "heads of at least 1, found 0"),
        ({"local": -1}, "local of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AttentionSettings(**change)


def test_a_training_step_is_of_a_model_of_as_many_layers_as_asked(bench):
    few, more = (dataclasses.replace(TRAINING, models=(), layers=layers, contexts=(8,)) for layers in (1, 3))
    one, three = (time_training(bench, settings)[0] for settings in (few, more))
    assert three["operations"] > 1.5 * one["operations"]
    assert three["direction"] == "training step of tiny with 3 layers"
    with pytest.raises(ValueError, match="expected layers of at least 1, found 0"):
        dataclasses.replace(few, layers=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            AttentionSettings(mechanisms=("polysketch",), bidirectional=True),
            "; mechanisms that see both sides: softmax, ",
        ),
        (PicturesSettings(models=("polysketch",)), "a patch sees the whole picture; expected one of softmax, "),
    ],
)
def test_what_sees_no_later_tokens_is_refused_with_those_that_do(settings, message):
    with pytest.raises(ValueError, match=f"polysketch is causal only.*{message}") as found:
        settings.check_names()
    assert "polysketch-paper" in str(found.value)


def test_an_unknown_model_or_preset_is_refused_with_those_that_exist(bench):
    unknown = r"unknown way to attend 'nonsense'; expected sdpa, given, .* a mechanism: softmax"
    for settings in (AttentionSettings(mechanisms=("given", "nonsense")), TrainingSettings(models=("nonsense",))):
        with pytest.raises(ValueError, match=unknown):
            settings.check_names()
        measure = time_training if isinstance(settings, TrainingSettings) else time_attention
        with pytest.raises(ValueError, match=unknown):
            measure(bench, settings)
    with pytest.raises(ValueError, match="unknown preset 'huge'"):
        time_decoding(bench, DecodingSettings(preset="huge"))


@pytest.mark.parametrize("name", ["softmax", "learned", "random", "polynomial"])
def test_a_state_at_a_position_is_that_of_a_model_that_read_so_many_tokens(name):
    """Of the same size and ready for the next token, without a doubling of buffers in the timed steps."""
    model = build_model(name, "tiny", Sizes(32, 16)).eval()
    state = state_at(model, 2, 70, room=16)
    assert state.position.tolist() == [70, 70]
    assert all(layer.position.tolist() == [70, 70] for layer in state.layers)
    before = state.nbytes
    logits, state = model.extend(torch.zeros(2, 16, dtype=torch.int64), state)
    assert torch.isfinite(logits).all()
    assert state.nbytes == before


def test_the_floor_of_a_step_counts_the_filled_part_of_a_cache():
    model = build_model("softmax", "tiny", Sizes())
    state = state_at(model, 1, 100)
    assert all(isinstance(layer, KeyValueState) for layer in attention_states(state))
    taps = 4 * 3 * 3 * 128 * 4  # of every layer the last three tokens' queries, keys and values
    assert read_bytes(model, state) == 4 * 2 * 100 * 128 * 4 + taps


def test_decoding_times_a_whole_chunk_from_its_start(bench):
    found = time_decoding(bench, DECODING)
    assert {one["position"] for one in found} == {32}
    assert all([len(seconds) for seconds in one["all_seconds"]] == [16, 16] for one in found)
    for one in found:
        means = [sum(seconds) / 16 for seconds in one["all_seconds"]]
        assert one["mean_seconds"] == pytest.approx(statistics.median(means))
        assert one["tokens_per_second"] == pytest.approx(1 / one["mean_seconds"])


def test_decoding_is_timed_on_states_of_half_the_size(bench):
    settings = dataclasses.replace(DECODING, models=("random",), positions=(16,))
    wide, half = (
        time_decoding(bench, dataclasses.replace(settings, state_dtype=dtype)) for dtype in (None, "bfloat16")
    )
    assert all(two["state_bytes"] < 0.6 * one["state_bytes"] for one, two in zip(wide, half, strict=True))


def test_models_of_one_name_start_from_the_same_weights():
    first, second = (build_model("learned", "tiny", Sizes()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
