"""Random sketches of `polysketch-paper` that are drawn anew while a model learns."""

import ast
import itertools

import pytest
import torch

from polysketch import attention

HEAD_DIM = 8


def build(**options):
    sizes = {"sketch_size": 6, "local_chunk": 4, "learned": False}
    return attention.build("polysketch-paper", num_heads=2, head_dim=HEAD_DIM, **{**sizes, **options})


def numbers(mechanism):
    """All that is drawn, as one row."""
    sketch = {name: tensor for name, tensor in mechanism.feature_map.named_buffers() if name != "next_seed"}
    return torch.cat([tensor.double().flatten() for tensor in sketch.values()])


@pytest.mark.parametrize("projection", ["gaussian", "srht"])
@pytest.mark.parametrize("degree", [4, 8])
def test_it_is_drawn_before_the_multiples_of_its_interval_from_its_own_seed(projection, degree):
    mechanism = build(redraw_interval=3, projection=projection, degree=degree)
    before, draws = torch.get_rng_state(), [numbers(mechanism)]
    for step in range(9):
        mechanism.redraw(step)
        draws.append(numbers(mechanism))
    assert [torch.equal(left, right) for left, right in itertools.pairwise(draws)] == [
        step not in (3, 6) for step in range(9)
    ]
    assert torch.equal(torch.get_rng_state(), before), "others' random numbers stay as they are"


def test_a_model_that_is_loaded_draws_what_the_saved_one_draws():
    mechanism, other = build(redraw_interval=2), build(redraw_interval=2)
    mechanism.redraw(2)
    other.load_state_dict(mechanism.state_dict())
    for one in (mechanism, other):
        one.redraw(4)
    assert torch.equal(numbers(mechanism), numbers(other))


def test_without_an_interval_nothing_is_drawn_and_nothing_more_is_saved():
    mechanism = build()
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


@pytest.mark.parametrize(("interval", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_an_interval_is_a_positive_integer(interval, error):
    with pytest.raises(error, match="redraw_interval must be"):
        build(redraw_interval=interval)


def test_a_learned_sketch_is_not_drawn():
    with pytest.raises(ValueError, match="redraw_interval=5 is for the random sketch: it needs learned=False"):
        build(redraw_interval=5, learned=True)


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
