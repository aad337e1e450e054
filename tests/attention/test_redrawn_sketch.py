"""Random sketches that are drawn anew while a model learns."""

import ast
import itertools

import pytest
import torch

from polysketch import attention

HEAD_DIM = 8
SKETCHED = {
    "polysketch-paper": {"sketch_size": 6, "local_chunk": 4, "learned": False},
    "polysketch-heavy": {"sketch_size": 6, "local_chunk": 4, "learned": False, "heavy_size": 2, "hash_bits": 2},
    "polysketch-window": {"sketch_size": 6, "window": 4, "features": "random", "far_bias": -6.0},
}
EACH = pytest.mark.parametrize("name", SKETCHED)


def build(name="polysketch-paper", **options):
    return attention.build(name, num_heads=2, head_dim=HEAD_DIM, **{**SKETCHED[name], **options})


def draw_inputs(length):
    """Query, key and value; 8 tokens lie beyond every window and chunk."""
    return torch.randn(3, 1, 2, length, HEAD_DIM, generator=torch.Generator().manual_seed(1)).unbind()


def numbers(mechanism):
    """All that is drawn, as one row."""
    sketch = {name: tensor for name, tensor in mechanism.feature_map.named_buffers() if name != "next_seed"}
    return torch.cat([tensor.double().flatten() for tensor in sketch.values()])


def projections_of(name):
    return [{"projection": kind} for kind in ("gaussian", "srht")] if name != "polysketch-window" else [{}]


def test_every_mechanism_with_a_random_sketch_can_draw_it_anew():
    with_interval = {name for name in attention.MECHANISMS if "redraw_interval" in attention.option_names(name)}
    assert with_interval == {*SKETCHED, "performer"}


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in SKETCHED for options in projections_of(name)]
)
@pytest.mark.parametrize("degree", [4, 8])
def test_it_is_drawn_before_the_multiples_of_its_interval_from_its_own_seed(name, options, degree):
    mechanism = build(name, redraw_interval=3, degree=degree, **options)
    before, draws = torch.get_rng_state(), [numbers(mechanism)]
    for step in range(9):
        mechanism.redraw(step)
        draws.append(numbers(mechanism))
    assert [torch.equal(left, right) for left, right in itertools.pairwise(draws)] == [
        step not in (3, 6) for step in range(9)
    ]
    assert torch.equal(torch.get_rng_state(), before), "others' random numbers stay as they are"


@EACH
def test_a_draw_is_another_function_and_what_is_not_of_the_sketch_stays(name):
    mechanism, inputs = build(name, redraw_interval=2), draw_inputs(12)
    others = {key: tensor.clone() for key, tensor in mechanism.state_dict().items() if "feature_map" not in key}
    before = mechanism(*inputs)
    mechanism.redraw(2)
    difference = (mechanism(*inputs) - before).detach().abs().amax((0, 1, 3))
    assert not difference[:4].any(), "within the exact part"
    assert (difference[8:] > 1e-6).all()
    state = mechanism.state_dict()
    assert others
    assert all(torch.equal(state[key], tensor) for key, tensor in others.items())


@EACH
def test_what_attends_or_decodes_draws_nothing(name):
    mechanism, (query, key, value) = build(name, redraw_interval=1), draw_inputs(12)
    kept = {key: tensor.clone() for key, tensor in mechanism.state_dict().items()}
    whole, state = mechanism(query, key, value), mechanism.init_state(1)
    parts = torch.arange(12).split([5, 1, 1, 4, 1])
    found = [mechanism.extend(query[:, :, rows], key[:, :, rows], value[:, :, rows], state)[0] for rows in parts]
    torch.testing.assert_close(torch.cat(found, 2), whole)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in mechanism.state_dict().items())


@EACH
def test_a_model_that_is_loaded_draws_what_the_saved_one_draws(name):
    mechanism, other = build(name, redraw_interval=2), build(name, redraw_interval=2)
    mechanism.redraw(2)
    other.load_state_dict(mechanism.state_dict())
    for one in (mechanism, other):
        one.redraw(4)
    assert torch.equal(numbers(mechanism), numbers(other))


@EACH
def test_without_an_interval_nothing_is_drawn_and_nothing_more_is_saved(name):
    mechanism = build(name)
    kept = numbers(mechanism)
    for step in range(4):
        mechanism.redraw(step)
    assert torch.equal(numbers(mechanism), kept)
    assert not any("seed" in name for name in mechanism.state_dict())


def test_what_a_seed_draws_is_the_kernel_in_the_mean():
    """The mean of many draws' squared roots, phi(q) . phi(k), is <q, k>^2: each draw is of the right distribution."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, HEAD_DIM, dtype=torch.float64)
    sketch = build(redraw_interval=1, sketch_size=64).feature_map.double()
    products = []
    for _ in range(1000):
        sketch.resample()
        products.append((sketch.map(query) * sketch.map(key)).sum())
    found = torch.stack(products)
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - (query * key).sum() ** 2) < 4 * error


@EACH
@pytest.mark.parametrize(("interval", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_an_interval_is_a_positive_integer(name, interval, error):
    with pytest.raises(error, match="redraw_interval must be"):
        build(name, redraw_interval=interval)


@pytest.mark.parametrize(
    ("name", "others", "needed"),
    [
        ("polysketch-paper", {"learned": True}, "learned=False"),
        ("polysketch-heavy", {"learned": True}, "learned=False"),
        ("polysketch-window", {"features": "learned"}, "features='random'"),
        ("polysketch-window", {"features": "codes"}, "features='random'"),
    ],
)
def test_features_that_are_not_random_are_not_drawn(name, others, needed):
    with pytest.raises(ValueError, match=f"redraw_interval=5 is for the random sketch: it needs {needed}"):
        build(name, redraw_interval=5, **others)


@pytest.mark.parametrize("option", ["sketch_expansion=4", "sketch_depth=3", "sketch_activation='relu'"])
def test_networks_of_a_sketch_that_is_not_learned_are_refused(option):
    name, value = option.split("=")
    with pytest.raises(ValueError, match=f"{option} is for the learned sketch: it needs learned=True"):
        build(**{name: ast.literal_eval(value)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sketch_depth": 0}, ValueError, "sketch_depth must be at least 1, got 0"),
        ({"sketch_depth": True}, TypeError, "sketch_depth must be an integer, got True"),
        ({"sketch_activation": "GELU"}, ValueError, "unknown activation 'GELU'; known activations: gelu, relu, silu"),
        ({"sketch_activation": None}, ValueError, "unknown activation None"),
    ],
)
def test_networks_that_do_not_exist_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        build(learned=True, **options)
