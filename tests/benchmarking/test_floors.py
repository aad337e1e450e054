"""What floors count of mechanisms is what their products are: by PyTorch's counter, or by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polysketch.benchmarking import floors, mechanisms
from polysketch.benchmarking.floors import Shape

COUNTED = {"backward": False, "itemsize": 4}
LONG = 1_024  # enough for sums: of few tokens all pairs are fewer
NORMED_LLOPS = {"num_features": 24, "degree": 3, "rank": 2, "nonnegative": True, "normalize": True}
EXACTLY = {
    "polynomial": {},
    "squared-polynomial": {},
    "squared-polynomial in linear form": {"linear": True, "coefficients": 2},
    "squared-polynomial of given coefficients": {"linear": True, "coefficients": (0.5, 1.0, 2.0)},
    "squared-polynomial of sketches": {"linear": True, "sketch_size": 4},
    "llops": NORMED_LLOPS,
    "performer": {"num_features": 24},
    "based": {"feature_dim": 6},
    "linear": {},
    "hyper": {"min_length": 64, "chunk_size": 16, "sample_size": 8, "hash_bits": 5},
}


def operations(name: str, options: dict, shape: Shape, **changed) -> float:
    return mechanisms.floor(name, options, shape, **{**COUNTED, **changed}).operations


def counted(name: str, options: dict, shape: Shape) -> int:
    """By PyTorch's counter, of a call in float64: not by programs."""
    torch.manual_seed(0)
    call = mechanisms.prepared(name, options, shape, torch.device("cpu"), torch.float64).call()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call.function()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", EXACTLY)
def test_where_all_tokens_see_one_another_floors_are_what_is_computed(case):
    shape = Shape(1, LONG, 2, 8, causal=False)
    name = case.split()[0]
    assert operations(name, EXACTLY[case], shape) == counted(name, EXACTLY[case], shape)


@pytest.mark.parametrize("case", ["llops", "performer", "based", "linear", "squared-polynomial in linear form"])
def test_sums_are_as_many_when_causal_and_what_chunks_compute_besides_is_in_no_floor(case):
    name, options = case.split()[0], EXACTLY[case]
    causal, both = (Shape(1, LONG, 2, 8, causal=causal) for causal in (True, False))
    assert operations(name, options, causal) == operations(name, options, both) < counted(name, options, causal)


def test_weights_of_either_sign_have_no_denominator():
    """The op's own count has one nonetheless."""
    shape = Shape(1, LONG, 2, 8, causal=False)
    options = {"num_features": 24, "degree": 3, "rank": 2}
    assert operations("llops", options, shape) == counted("llops", options, shape) - 2 * 2 * shape.rows * 24


def test_a_chunk_of_exact_weights_is_counted_beside_the_features_of_tokens_beyond_the_first():
    shape, options = Shape(1, 128, 2, 8), {"num_features": 24, "local_chunk": 16}
    near, maps, sums = 4 * 128 * 2 * 8 * 8, 4 * 128 * 2 * 8 * 24, 4 * (128 - 16) * 2 * 24 * 9
    assert operations("performer", options, shape) == near + maps + sums


def test_queries_of_causal_hyperattention_meet_their_block_and_a_few_keys_of_each_span():
    """By hand: 5 blocks of 4 tokens; 8 queries meet blocks before, 8 a pair of them and 4 four, 2 + 1 keys each."""
    shape, options = Shape(1, 20, 2, 8), {"min_length": 4, "chunk_size": 2, "sample_size": 1, "hash_bits": 3}
    pairs = 5 * 4 * 4 / 2 + (8 + 8 + 4) * 3
    hashes = 2 * 2 * 20 * 2 * 8 * 3
    assert operations("hyper", options, shape) == 4 * pairs * 2 * 8 + hashes
    assert operations("hyper", options, shape, backward=True) == 3.5 * 4 * pairs * 2 * 8 + hashes
    longer = 4 * (pairs + 1 / 2 + 3 + 3) * 2 * 8 + hashes * 21 / 20  # one more: a block, and spans of one and four
    assert operations("hyper", options, Shape(1, 21, 2, 8)) == longer


def test_what_causal_hyperattention_computes_is_its_floor_and_at_most_as_many_empty_slots_of_its_spans():
    shape, options = Shape(1, 256, 2, 8), {"min_length": 32, "chunk_size": 8, "sample_size": 8, "hash_bits": 3}
    floor, inside = operations("hyper", options, shape), 4 * 8 * 32 * 32 / 2 * 2 * 8
    assert floor < counted("hyper", options, shape) < inside + 2.5 * (floor - inside)


def test_up_to_its_exact_length_hyperattention_is_exact_attention():
    for causal in (True, False):
        shape = Shape(2, 64, 2, 8, causal)
        assert mechanisms.floor("hyper", {"min_length": 64}, shape, **COUNTED) == floors.exact_attention(
            shape, **COUNTED
        )
        fewer = operations("hyper", {"min_length": 16, "chunk_size": 4, "sample_size": 4}, shape)
        assert fewer < floors.exact_attention(shape, **COUNTED).operations


def test_spans_have_no_more_keys_to_meet_than_they_hold():
    """By hand: 4 blocks of 16; twice 16 queries meet all 16 keys of the block before, and 32 meet 24 of 32 keys."""
    shape, options = Shape(1, 64, 2, 8), {"min_length": 16, "chunk_size": 20, "sample_size": 4, "hash_bits": 1}
    pairs = 4 * 16 * 16 / 2 + 32 * 16 + 32 * 24
    assert operations("hyper", options, shape) == 4 * pairs * 2 * 8 + 2 * 2 * shape.rows * 8


def test_heavy_entries_are_the_keys_that_buckets_of_one_size_would_hold():
    """By hand: before chunks of 64 are 0, 64, 128 and 192 tokens, a fourth in each of 4 buckets; at most 20 count."""
    options = {"local_chunk": 64, "sketch_size": 4, "heavy_size": 20, "hash_bits": 3}
    shape = Shape(1, 256, 2, 8)
    hashes, candidate = 2 * 2 * shape.rows * 8 * 3, 2 * (8 + 4 + 8 + 1)
    named = {name: options[name] for name in ("local_chunk", "sketch_size")}
    without = operations("polysketch-paper", named, shape)
    assert operations("polysketch-heavy", options, shape) - without == hashes + 2 * 64 * (0 + 16 + 20 + 20) * candidate
    both = Shape(1, 256, 2, 8, causal=False)
    more = operations("polysketch-heavy", options, both) - operations("polysketch-paper", named, both)
    assert more == hashes + 2 * 2 * 64 * (0 + 16 + 20 + 20) * candidate


def test_of_polysketch_the_window_the_sketches_and_three_products_with_the_sums_are_counted():
    shape, options = Shape(2, 256, 2, 8), {"window": 64, "sketch_size": 6}
    near, maps = floors.nearby_attention(shape, 64, **COUNTED).operations, 2 * 2 * shape.rows * 8 * 12
    sums = 2 * 2 * 2 * (256 - 64) * 36 * 9
    assert operations("polysketch", options, shape) == near + maps + 3 * sums
    assert operations("polysketch", {**options, "sketched": "both"}, shape) == near + 2 * maps + 3 * sums
    assert operations("polysketch", options, shape, backward=True) == 3.5 * near + 3 * maps + 10 * sums
    within = Shape(2, 64, 2, 8)
    assert operations("polysketch", options, within) == (near - 4 * 2 * 2 * 192 * 64 * 8) / 2 + maps / 4


@pytest.mark.parametrize("networks", [{}, {"sketch_expansion": 4, "sketch_depth": 3}])
def test_the_networks_of_a_sketch_are_counted_as_they_are(networks):
    """What comes after them is the same."""
    shape, options = Shape(1, 64, 2, 8), {"local_chunk": 64, "sketch_size": 4}
    both = [{**options, **networks}, {**options, "learned": False}]
    learned, random = (operations("polysketch-paper", each, shape) for each in both)
    found = [counted("polysketch-paper", each, shape) for each in both]
    assert learned - random == found[0] - found[1] > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hyper", {"sampling": "norm"}),
        ("hyper", {"capping": (0.5, 2.0)}),
        ("polysketch-paper", {"learned": False, "projection": "srht"}),
        ("polysketch-heavy", {"degree": 2}),
    ],
)
def test_what_is_not_counted_has_no_floor(name, options):
    assert mechanisms.floor(name, options, Shape(1, 64, 2, 8), **COUNTED) is None
