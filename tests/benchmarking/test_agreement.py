"""What is timed is right: every way agrees with its definition, and every way to be wrong is refused."""

from dataclasses import replace

import pytest
import torch

from ops import spoiled
from polysketch.attention import PolysketchPaperAttention
from polysketch.benchmarking import (
    AttentionSettings,
    DecodingSettings,
    TrainingSettings,
    attention_alone,
    time_attention,
    time_decoding,
    time_training,
)
from polysketch.benchmarking.agreement import TOLERANCES, disagreement, relative_error
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.way_names import Sizes
from polysketch.benchmarking.ways import way
from polysketch.ops import LocalPolynomial, linear_attention
from polysketch.ops.linear.backends import BACKENDS

CPU = torch.device("cpu")
SMALL = {"lengths": (64, 96), "heads": 2, "head_dim": 16, "sketch_size": 8, "local": 16}
CHECKED = ["given", "learned", "random", "polynomial"]


def check_call(name: str, dtype: torch.dtype = torch.float32, local: int = 32) -> Call:
    """What `check_agreement` compares."""
    torch.manual_seed(0)
    return way(name, Sizes(32, local)).prepare_check(Shape(1, 2 * local + local // 2 + 1, 2), CPU, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CHECKED)
def test_every_variant_agrees_with_its_definition_forward_and_backward(name, dtype):
    errors = disagreement(check_call(name, dtype), backward=True)
    assert errors["output"] < TOLERANCES[dtype]
    assert max(errors.values()) < 10 * TOLERANCES[dtype]
    assert len(errors) > 3


def with_value_of_ones(call_shape: Shape, *, prefix: bool) -> torch.Tensor:
    """Total weights of the check of features given, with or without the sketched part."""
    torch.manual_seed(0)
    sizes = Sizes(32, 32)
    call = way("given", sizes).prepare_check(call_shape, CPU, torch.float64)
    query_features, key_features, value, query, key = call.leaves
    local = LocalPolynomial(query, key, 4, sizes.local)
    shown = query_features if prefix else torch.zeros_like(query_features)
    options = {"power": 2, "causal": True, "normalize": False, "local": local}
    return linear_attention(shown, key_features, torch.ones_like(value), **options).output.sum()


def test_sketched_weights_hold_a_fair_share_of_the_mass_in_the_check():
    shape = Shape(1, 81, 2)
    share = 1 - with_value_of_ones(shape, prefix=False) / with_value_of_ones(shape, prefix=True)
    assert 0.3 <= share <= 0.7


def one_element_unwritten(result, _):
    output = result.output.clone()
    output[0, 0, 0, 0] = torch.nan
    return result._replace(output=output)


def without_the_last_token(result, _):
    output = result.output.clone()
    output[:, :, -1] = 0
    return result._replace(output=output)


def without_prefix(inputs, plan):
    return inputs._replace(query=torch.zeros_like(inputs.query)), plan


def without_chunks(inputs, plan):
    return inputs._replace(local_query=None, local_key=None), plan


def without_option(**changed):
    """A backend that ignores what it is asked for."""
    return spoiled.with_other_call(lambda inputs, plan: (inputs, plan._replace(**changed)))


WRONG = {
    "scaled": spoiled.scaled(1.0003),
    "NaN": spoiled.with_other_result(one_element_unwritten),
    "last token": spoiled.with_other_result(without_the_last_token),
    "no prefix": spoiled.with_other_call(without_prefix),
    "no chunks": spoiled.with_other_call(without_chunks),
    "not causal": without_option(causal=False),
    "not normalized": without_option(normalize=False),
    "another power": without_option(power=1),
    "no offset": without_option(offset=0.0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_backend_that_disagrees_is_refused_before_anything_is_timed(wrong, bench, monkeypatch):
    monkeypatch.setitem(BACKENDS, "wrong", wrong)
    monkeypatch.setattr(Clock, "alternate", lambda *_, **__: pytest.fail("timed"))
    settings = AttentionSettings(**SMALL, mechanisms=("given",), backend="wrong")
    with pytest.raises(ValueError, match=r"'wrong'.* is off by (\S+) of its size .* expected at most 0.0001$"):
        time_attention(bench, settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_a_dtype_without_a_tolerance_is_refused(dtype, bench):
    settings = AttentionSettings(**SMALL, mechanisms=("given",))
    with pytest.raises(ValueError, match=f"expected torch.float32 or torch.bfloat16 to be timed, found {dtype}"):
        time_attention(replace(bench, dtype=dtype), settings)


@pytest.mark.parametrize("local", [2**20 + 1, 2**63 - 1, 10**30])
def test_chunks_longer_than_any_text_are_refused(local):
    with pytest.raises(ValueError, match="local: expected at most 1,048,576 tokens, found"):
        DecodingSettings(local=local)


def test_the_intact_backend_in_the_same_place_is_timed(bench, monkeypatch):
    monkeypatch.setitem(BACKENDS, "right", spoiled.scaled(1.0))
    found = time_attention(bench, AttentionSettings(**SMALL, mechanisms=("given",), backend="right"))
    assert {one["backend"] for one in found} == {None, "right"}


def wrong_gradient(result, inputs):
    extra = inputs.query.sum(-1, keepdim=True)
    return result._replace(output=result.output + 0.1 * (extra - extra.detach()))


def test_a_wrong_gradient_is_refused_when_gradients_are_timed(bench, monkeypatch):
    monkeypatch.setitem(BACKENDS, "wrong", spoiled.with_other_result(wrong_gradient))
    settings = {**SMALL, "mechanisms": ("given",), "backend": "wrong"}
    time_attention(bench, AttentionSettings(**settings))
    with pytest.raises(ValueError, match="its gradient of input 1 is off by"):
        time_attention(bench, AttentionSettings(**settings, backward=True))


@pytest.mark.parametrize("names", [("learned",), ("random",), ("given", "learned")])
def test_the_backend_that_auto_means_at_the_timed_lengths_is_checked(names, bench, monkeypatch):
    """A wrong one behind "auto" is found too, whatever it picks at the small length of the check."""
    monkeypatch.setitem(BACKENDS, "wrong", WRONG["scaled"])
    monkeypatch.setattr(attention_alone.ops, "linear_attention_backend", lambda *_, **__: "wrong")
    with pytest.raises(ValueError, match=r"'wrong'.* is not timed"):
        time_attention(bench, AttentionSettings(**SMALL, mechanisms=names))


def test_a_model_whose_attention_is_wrong_is_not_trained(bench, monkeypatch):
    monkeypatch.setitem(BACKENDS, "wrong", WRONG["scaled"])
    monkeypatch.setattr(attention_alone.ops, "linear_attention_backend", lambda *_, **__: "wrong")
    with pytest.raises(ValueError, match="is not timed"):
        time_training(bench, TrainingSettings(preset="tiny", contexts=(64,), local=16))


def test_attention_that_is_wrong_when_it_generates_is_refused(bench, monkeypatch):
    intact = PolysketchPaperAttention.extend

    def forgetful(module, query, key, value, state, **options):
        """Loses what was folded at the end of a chunk."""
        output, state = intact(module, query, key, value, state, **options)
        if query.shape[2] == 1 and int(state.fill[0]) == 0:
            state.sums.zero_()
        return output, state

    settings = DecodingSettings(preset="tiny", positions=(64,), local=16, models=("learned",))
    assert time_decoding(bench, settings)
    monkeypatch.setattr(PolysketchPaperAttention, "extend", forgetful)
    with pytest.raises(ValueError, match="learned, generating, is wrong and is not timed: its output is off by"):
        time_decoding(bench, settings)


def test_an_error_of_another_shape_or_not_finite_is_infinite():
    ones = torch.ones(3)
    assert relative_error(ones, ones) == 0
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(ones, torch.ones(4)) == float("inf")
    assert relative_error(ones * torch.nan, ones) == float("inf")
