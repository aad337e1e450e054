"""The correction by candidates of a query's bucket: equal to its definition, every candidate counted once."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention.covering import pairs_always
from polysketch.ops.heavy import chunk_edges, correction, heavy_correction, line_codes, reference, sort_keys
from polysketch.ops.heavy.candidates import windows
from polysketch.ops.heavy.tile_pairs import KEYS, make_pairs, pairs_at_most

BATCH, HEADS, KEY_HEADS = 2, 4, 2
WIDTHS = {"query": 8, "key": 8, "query_features": 6, "key_features": 6, "value": 5}
HEADS_OF = {"query": HEADS, "query_features": HEADS}
SIZES = pytest.mark.parametrize(
    ("length", "chunk", "bits", "size"),
    [(1, 8, 3, 4), (63, 8, 3, 4), (65, 64, 1, 100), (200, 16, 4, 1), (333, 16, 4, 11), (333, 1, 2, 64)],
)


def make(length: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str) -> Tensor:
        shape = (BATCH, HEADS_OF.get(name, KEY_HEADS), length, WIDTHS[name])
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {name: draw(name) for name in WIDTHS}


def make_mask(length: int) -> Tensor:
    """Tokens masked here and there; one row begins with padding."""
    mask = torch.rand(BATCH, length, generator=torch.Generator().manual_seed(1)) > 0.2
    mask[0, : length // 5] = False
    return mask


def places(tensors: dict[str, Tensor], chunk: int, bits: int, mask: Tensor, *, causal: bool) -> dict[str, Tensor]:
    """Codes by random hyperplanes, and the edges of aligned chunks."""
    planes = torch.randn(WIDTHS["query"], bits, generator=torch.Generator().manual_seed(2))
    before, after = chunk_edges(tensors["query"], chunk, mask)
    return {
        "query_codes": line_codes(tensors["query"], planes),
        "key_codes": line_codes(tensors["key"], planes).masked_fill(~mask[:, None], -1),
        "before": before,
        "after": None if causal else after,
    }


@SIZES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_output_and_gradients_are_those_of_the_definition(length, chunk, bits, size, causal, masked):
    tensors = {name: x.requires_grad_() for name, x in make(length).items()}
    mask = make_mask(length) if masked else torch.ones(BATCH, length, dtype=torch.bool)
    options = {**places(tensors, chunk, bits, mask, causal=causal), "size": size}
    found, expected = (
        heavy_correction(*_ordered(tensors), **options),
        reference.heavy_correction(*_ordered(tensors), **options),
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(expected)
    gradients = [torch.autograd.grad(x, _ordered(tensors), upstream) for x in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert length == 1 or bool(expected.abs().amax() > 1)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_with_heads_of_their_own_change_no_bit(threads, monkeypatch):
    """Of three shares of four leads, one has two."""
    tensors = {name: x.requires_grad_() for name, x in make(333, dtype=torch.float32).items()}
    mask, shared = make_mask(333), []
    options = {**places(tensors, 16, 3, mask, causal=False), "size": 11}

    def computed() -> list[Tensor]:
        output = heavy_correction(*_ordered(tensors), **options)
        return [output, *torch.autograd.grad(output.square().sum(), list(tensors.values()))]

    expected, run = computed(), correction.run_in_parallel
    monkeypatch.setattr(correction, "_QUERIES_WORTH_A_THREAD", 1)
    monkeypatch.setattr(correction, "num_workers", lambda device: threads)
    monkeypatch.setattr(
        correction, "run_in_parallel", lambda work, shares: (shared.append(len(shares)), run(work, shares))
    )
    assert all(map(torch.equal, computed(), expected))
    assert shared == [threads] * 2


def _ordered(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensors[name] for name in ("query", "key", "query_features", "key_features", "value"))


def random_codes(leads: int, queries: int, keys: int, buckets: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Buckets of queries (one of them without keys, one key in four in none) and edges with many ties."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(seed))
    key_codes = draw(0, buckets, (leads, keys))
    key_codes = key_codes.masked_fill(draw(0, 4, (leads, keys)) == 0, -1)
    edges = (draw(0, keys + 1, (leads, queries)) // 7 * 7).sort(dim=1).values
    return draw(0, buckets + 1, (leads, queries)), key_codes, edges


CUTS = ((3, 130, 130, 5, 9), (2, 1, 700, 1, 70), (2, 700, 9, 1, 70), (1, 64, 64, 1, 64), (2, 500, 900, 3, 1000))
"""Leads, queries, keys, buckets and the size of a bucket's part."""


@pytest.mark.parametrize(
    ("sizes", "behind", "count"), pairs_always({"sizes": CUTS, "behind": (False, True), "count": (True, False)})
)
def test_every_candidate_is_in_one_pair_and_nothing_else_is(sizes, behind, count):
    leads, queries, keys, buckets, size = sizes
    query_codes, key_codes, edges = random_codes(leads, queries, keys, buckets, seed=queries)
    cut = windows(query_codes, sort_keys(key_codes), edges, size, behind=behind)
    pairs, seen = make_pairs(cut, size, count=count), torch.zeros(leads * queries, leads * keys, dtype=torch.int64)
    for number in range(len(pairs.tile)):
        part = correction._part(pairs, cut.key_rows, slice(number, number + 1))
        for row, hidden in zip(part.queries[0], part.hidden[0], strict=True):
            seen[row].index_add_(0, part.keys[0][~hidden], torch.ones(KEYS, dtype=torch.int64)[~hidden])
    shaped = (x[:, None] for x in (query_codes, key_codes))
    none = torch.zeros_like(edges)
    expected = reference.candidates(*shaped, *((none, edges) if behind else (edges, None)), size=size)
    assert torch.equal(seen, torch.block_diag(*expected[:, 0].long()))
    assert int(seen.sum()) > 0


@pytest.mark.parametrize("buckets", [1, 2, 30])
@pytest.mark.parametrize("size", [1, 64, 200])
def test_the_number_of_pairs_stays_below_its_bound(buckets, size):
    for seed, behind in ((0, False), (1, True)):
        query_codes, key_codes, edges = random_codes(3, 640, 640, buckets, seed)
        cut = windows(query_codes, sort_keys(key_codes), edges, size, behind=behind)
        most = pairs_at_most(3, 640, 640, size)
        assert len(make_pairs(cut, size, count=True).tile) <= most
        assert len(make_pairs(cut, size, count=False).tile) == most
        assert most <= 3 * (3 * 10 + 10 * size / 64 + 1)


def test_the_bound_is_reached():
    """One bucket, queries behind all keys in steps: each tile's span is all that the bound gives it."""
    codes = torch.zeros(1, 64 * 3, dtype=torch.int64)
    edges = torch.arange(1, 64 * 3 + 1)[None]
    cut = windows(codes, sort_keys(codes), edges, 64, behind=False)
    assert len(make_pairs(cut, 64, count=True).tile) == 5
    assert pairs_at_most(1, 192, 192, 64) == 8


@pytest.mark.parametrize("causal", [True, False])
def test_superfluous_pairs_add_nothing(causal, monkeypatch):
    tensors, mask = make(200), make_mask(200)
    options = {**places(tensors, 16, 3, mask, causal=causal), "size": 9}
    expected = heavy_correction(*_ordered(tensors), **options)
    padded = lambda windows, size, count: make_pairs(windows, size, count=False)  # noqa: E731
    monkeypatch.setattr(correction, "make_pairs", padded)
    assert torch.equal(heavy_correction(*_ordered(tensors), **options), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_masked_keys_are_not_read(causal):
    tensors, mask = make(200), make_mask(200)
    options = {**places(tensors, 16, 4, mask, causal=causal), "size": 9}
    poisoned = {name: x.masked_fill(~mask[:, None, :, None], torch.nan) for name, x in tensors.items()}
    poisoned |= {name: tensors[name] for name in ("query", "query_features")}
    expected = heavy_correction(*_ordered(tensors), **options)
    torch.testing.assert_close(heavy_correction(*_ordered(poisoned), **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_of_the_inputs_as_they_are(dtype):
    tensors, mask = make(200, dtype=dtype), make_mask(200)
    options = {**places(tensors, 16, 3, mask, causal=True), "size": 9}
    wide = {name: x.double() for name, x in tensors.items()}
    expected = reference.heavy_correction(*_ordered(wide), **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = heavy_correction(*_ordered(tensors), **options)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_opcheck_passes():
    tensors, mask = make(40), make_mask(40)
    options = {**places(tensors, 8, 3, mask, causal=False), "degree": 4, "size": 5}
    leaves = (x.requires_grad_() for x in _ordered(tensors))
    torch.library.opcheck(torch.ops.polysketch.heavy_correction.default, (*leaves, *options.values()))


def test_a_vector_and_its_opposite_share_a_bucket():
    generator = torch.Generator().manual_seed(0)  # planes nearly alike would leave a bucket empty
    x, planes = (torch.randn(*sizes, generator=generator) for sizes in ((500, 8), (8, 5)))
    codes = line_codes(x, planes)
    assert torch.equal(codes, line_codes(-3 * x, planes))
    assert codes.unique().tolist() == list(range(16))
    assert not line_codes(x, planes[:, :1]).any()


def test_lines_share_a_bucket_as_often_as_their_angle_says():
    generator, angle, bits = torch.Generator().manual_seed(0), 0.6, 4
    one = torch.tensor([[1.0, 0.0]])
    other = torch.tensor([[math.cos(angle), math.sin(angle)]])
    draws = [torch.randn(2, bits, generator=generator) for _ in range(4000)]
    share = sum(bool(line_codes(one, planes) == line_codes(other, planes)) for planes in draws) / len(draws)
    expected = (1 - angle / math.pi) ** bits + (angle / math.pi) ** bits
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(draws))


def test_edges_are_those_of_chunks_from_the_first_real_token():
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :2] = mask[1, 5] = False
    before, after = chunk_edges(torch.zeros(2, 1, 9, 1), 4, mask)
    assert before.tolist() == [[0, 0, 0, 0, 4, 4, 4, 4, 8], [0, 0, 2, 2, 2, 2, 6, 6, 6]]
    assert after.tolist() == [[4, 4, 4, 4, 8, 8, 8, 8, 9], [9, 9, 6, 6, 6, 6, 9, 9, 9]]
    assert torch.equal(chunk_edges(torch.zeros(2, 1, 9, 1), 4)[0][1], before[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"degree": 3}, "degree must be even"),
        ({"size": 0}, "size must be at least 1"),
        ({"key_codes": torch.zeros(1)}, "key_codes must be whole numbers"),
        ({"before": torch.zeros(2, 39, dtype=torch.int64)}, r"before must be whole numbers \(2, 40\)"),
        ({"after": torch.zeros(2, 40)}, "after must be whole numbers"),
        ({"before": torch.full((2, 40), 41)}, "before must be from 0 to 40"),
        ({"before": torch.full((2, 40), -1)}, "before must be from 0 to 40"),
        ({"before": torch.full((2, 40), 4), "after": torch.full((2, 40), 3)}, "after must be from before to 40"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    tensors = make(40)
    options = {**places(tensors, 8, 3, make_mask(40), causal=True), **changes}
    with pytest.raises(ValueError, match=message):
        heavy_correction(*_ordered(tensors), **options)
    with pytest.raises(ValueError, match="query and query_features must agree"):
        heavy_correction(*_ordered(tensors | {"query": tensors["query"][:, :, :3]}), **options)
