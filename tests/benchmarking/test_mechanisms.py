"""Every mechanism of the table can be timed by name: it is right, it says what it is, and none takes too long."""

import pytest
import torch

from ops import spoiled
from polysketch import attention as library
from polysketch import ops
from polysketch.benchmarking import (
    AttentionSettings,
    DecodingSettings,
    TrainingSettings,
    mechanisms,
    memory,
    time_attention,
    time_decoding,
    time_training,
)
from polysketch.benchmarking.agreement import disagreement
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.growth import Growth
from polysketch.benchmarking.models import build_model
from polysketch.benchmarking.plot import plot_time_per_token
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.way_names import BASELINE, Sizes, arranged, attentions, parsed
from polysketch.benchmarking.ways import way
from polysketch.ops.linear.backends import BACKENDS

CPU = torch.device("cpu")
SMALL = {"lengths": (32, 64), "heads": 2, "head_dim": 16, "local": 16}


@pytest.mark.parametrize("name", library.MECHANISMS)
def test_every_mechanism_agrees_with_itself_in_float64_forward_and_backward(name):
    torch.manual_seed(0)
    call = way(name, Sizes(8, 16)).prepare_check(Shape(1, 41, 2, 16), CPU, torch.float32)
    errors = disagreement(call, backward=True)
    assert errors["output"] < 1e-4
    assert max(errors.values()) < 1e-3


def test_in_a_check_chunks_and_windows_are_far_shorter_than_the_sequence_and_the_sketch_has_its_share():
    assert mechanisms.checked_options("sliding-window", {}, 16) == {"window": 16}
    assert mechanisms.checked_options("sliding-window", {"window": 4}, 16) == {"window": 4}
    assert mechanisms.checked_options("polysketch-paper", {}, 16) == {"local_chunk": 16, "prefix_gain": 0.5}
    assert mechanisms.checked_options("polysketch-paper", {"local_chunk": None}, 16) == {"local_chunk": None}
    hyper = mechanisms.checked_options("hyper", {}, 16)
    assert hyper == {"min_length": 16, "chunk_size": 2, "sample_size": 2}


def test_all_stands_for_every_name_of_the_table_once():
    others = [name for name in library.MECHANISMS if name != "linear"]
    assert AttentionSettings(mechanisms=("linear", "all")).names == [BASELINE, "linear", *others]
    assert AttentionSettings().names == [BASELINE, "given", "learned", "random"]


def test_options_are_numbers_none_truths_and_words():
    options = parsed("polysketch-paper:local_chunk=none,learned=false,projection=srht,sketch_size=8")[1]
    assert options == {"local_chunk": None, "learned": False, "projection": "srht", "sketch_size": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "unknown way to attend 'nonsense'; expected sdpa, given, "),
        ("linear:window=3", r"'linear' has no option 'window' \(.*sliding-window\); it takes kind"),
        ("linear:kind", "expected mechanism:option=value,option=value, found 'kind' in 'linear:kind'"),
    ],
)
def test_an_unknown_mechanism_or_option_is_refused_with_those_that_exist(text, message):
    with pytest.raises(ValueError, match=message):
        AttentionSettings(mechanisms=(text,)).check_names()


def test_a_mechanism_that_joins_the_table_is_timed_trained_and_generates_by_its_name(bench, monkeypatch):
    """Without a line in the benchmarks."""

    class Newcomer(library.LocalAttention):
        pass

    monkeypatch.setitem(library.MECHANISMS, "newcomer", Newcomer)
    name, small = "newcomer:local_chunk=16", {"preset": "tiny", "local": 16}
    found = [
        *time_attention(bench, AttentionSettings(**SMALL, mechanisms=(name,))),
        *time_training(bench, TrainingSettings(models=(name,), contexts=(48,), **small)),
        *time_decoding(bench, DecodingSettings(models=(name,), positions=(40,), **small)),
    ]
    assert [one["series"] for one in found if one["series"] not in ("sdpa", "softmax")] == [name] * 4


@pytest.mark.parametrize("name", [name for name, kind in library.MECHANISMS.items() if kind.is_causal])
def test_every_causal_mechanism_agrees_with_its_definition_when_it_generates(name):
    torch.manual_seed(0)
    call = mechanisms.prepare_generation(name, {}, Shape(1, 41, 2, 16), CPU, torch.float32, local=16)
    assert disagreement(call, backward=False)["output"] < 1e-4


def test_options_reach_the_mechanism_that_is_timed():
    call = way("hedgehog:num_features=40", Sizes()).prepare(Shape(1, 8, 2, 16), CPU, torch.float32)
    assert any(20 in leaf.shape for leaf in call.leaves[3:])


def test_what_cannot_be_causal_is_timed_bidirectionally_and_says_so(bench):
    found = time_attention(bench, AttentionSettings(**SMALL, mechanisms=("nystrom:num_landmarks=8", "local")))
    titles = {one["series"]: one["floor_seconds"] for one in found}
    assert list(titles) == ["sdpa", "nystrom:num_landmarks=8 (bidirectional)", "local"]
    assert titles["local"] > 0
    assert titles["nystrom:num_landmarks=8 (bidirectional)"] is None


def test_a_wrong_backend_behind_a_mechanism_is_refused_before_anything_is_timed(bench, monkeypatch):
    monkeypatch.setitem(BACKENDS, "wrong", spoiled.scaled(1.001))
    monkeypatch.setattr(ops, "linear_attention_backend", lambda *_, **__: "wrong")
    monkeypatch.setattr(Clock, "alternate", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"linear \(backend 'wrong'\) is wrong and is not timed"):
        time_attention(bench, AttentionSettings(**SMALL, mechanisms=("linear",)))


def test_a_mechanism_that_is_wrong_in_float32_is_refused(bench, monkeypatch):
    intact = library.SoftmaxAttention.forward

    def rough(module, query, *tensors, **options):
        return intact(module, query, *tensors, **options) * (1.001 if query.dtype == torch.float32 else 1)

    monkeypatch.setattr(library.SoftmaxAttention, "forward", rough)
    with pytest.raises(ValueError, match=r"softmax is wrong and is not timed: its output is off by 0\.001"):
        time_attention(bench, AttentionSettings(**SMALL, mechanisms=("softmax",)))


def test_a_series_ends_where_its_own_growth_would_exceed_the_budget():
    growth = Growth(1.0)
    assert growth.allows("new", 10**9)
    for length in (1_000, 2_000):
        growth.note("linear", length, length / 10_000)
        growth.note("quadratic", length, (length / 10_000) ** 2 * 10)
    assert growth.allows("linear", 9_900)
    assert not growth.allows("linear", 10_100)
    assert growth.allows("quadratic", 3_100)
    assert not growth.allows("quadratic", 3_200)
    growth.note("once", 1_000, 0.3)
    assert not growth.allows("once", 2_000)
    assert Growth(None).allows("once", 10**9)


def test_a_series_that_failed_goes_on_at_shorter_lengths_alone():
    growth = Growth(1.0)
    growth.note("failed", 2_000, float("inf"))
    assert [growth.allows("failed", length) for length in (1_000, 2_000, 4_000)] == [True, False, False]
    growth.note("failed", 1_000, 0.1)
    assert [growth.allows("failed", length) for length in (1_500, 2_000)] == [True, False]


def test_what_is_over_budget_keeps_its_row_and_is_not_drawn(bench, monkeypatch, tmp_path):
    slow = {"softmax": 5.0, "linear": 0.1, BASELINE: 0.1}
    alternate = lambda _, functions, **__: {name: [slow[name]] for name in functions}  # noqa: E731
    monkeypatch.setattr(Clock, "alternate", alternate)
    settings = AttentionSettings(**SMALL, mechanisms=("softmax", "linear"), budget_seconds=1.0)
    found = time_attention(bench, settings)
    left_out = [(one["length"], one["series"]) for one in found if one["over_budget"]]
    assert len(found) == 6
    assert left_out == [(64, "softmax")]
    assert all((one["seconds"] is None) == (one["ratio"] is None) == one["over_budget"] for one in found)
    plot_time_per_token(found, "title", tmp_path / "plot.svg")


def test_many_series_share_a_legend_and_memory_has_a_panel_of_its_own(tmp_path):
    names = [f"series {number}" for number in range(20)]
    found = [
        {"direction": "forward", "series": name, "length": length, "tokens": length, "seconds": 1.0}
        | {"floor_seconds": None, "peak_bytes": length * 1_000}
        for name in names
        for length in (64, 128)
    ]
    plot_time_per_token(found, "title", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('<g id="axes_') == 2
    assert drawn.count('<g id="legend_') == 1
    assert all(drawn.count(f"<!-- {name} -->") == 1 for name in names)


def test_memory_of_a_shape_does_not_depend_on_those_measured_before(bench):
    large, small = Shape(1, 4_096, 2), Shape(1, 512, 2)
    found = memory.attention(bench, "llops", [large, small, large], Sizes(), backward=False)
    assert found[2] == pytest.approx(found[0], rel=0.2)
    assert found[1] < found[0] / 3


@pytest.mark.full
def test_a_copy_that_fails_is_reported_with_its_error(bench):
    shapes = [Shape(1, 8), Shape(1, 16)]
    with pytest.raises(RuntimeError, match=r"memory of nonsense failed: ValueError: unknown way to attend 'nonsense'"):
        memory.attention(bench, "nonsense", shapes, Sizes(), backward=False)


def test_a_number_behind_a_name_says_in_which_layers_it_stands():
    assert arranged("polysketch:window=64/4") == ("polysketch:window=64", 4)
    assert arranged("polysketch:window=64") == ("polysketch:window=64", 1)
    assert attentions(["softmax", "polysketch/4", "polysketch"]) == ("softmax", "polysketch", "sliding-window")
    for wrong in ("polysketch/", "polysketch/0", "polysketch/two"):
        with pytest.raises(ValueError, match=f"expected MECHANISM/LAYERS, as in polysketch/4, found '{wrong}'"):
            arranged(wrong)
    model = build_model("polysketch:window=64/2", "tiny", Sizes())
    assert [name for name, _ in model.config.layers()] == ["sliding-window", "polysketch"] * 2
