"""Hashing by hyperplanes and its Gray-code order: what neighbours share, and how likely vectors at an angle collide."""

import math

import pytest
import torch

from polysketch.ops.hyper import gray_rank, hash_codes


def normal(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differing_bits(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    return [bin(a ^ b).count("1") for a, b in zip(one.tolist(), other.tolist(), strict=True)]


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 12])
def test_buckets_sorted_by_their_rank_differ_from_the_next_in_one_bit(bits):
    codes = torch.arange(2**bits)
    order = gray_rank(codes).argsort()
    assert gray_rank(codes).sort().values.equal(codes)
    assert set(differing_bits(order[1:], order[:-1])) == {1}


def test_sorting_by_the_gray_code_itself_would_not_do():
    codes = torch.arange(128)
    order = (codes ^ (codes >> 1)).argsort()
    assert max(differing_bits(order[1:], order[:-1])) == 4


def test_the_rank_is_the_inverse_of_the_gray_code_up_to_62_bits():
    ranks = torch.randint(2**62 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    assert gray_rank(ranks ^ (ranks >> 1)).equal(ranks)


def test_each_bit_is_the_side_of_its_hyperplane():
    x, hyperplanes = normal(2, 3, 50, 8), normal(8, 7, seed=1)
    codes = hash_codes(x, hyperplanes)
    assert codes.dtype == torch.int64
    for bit in range(7):
        assert ((codes >> bit) & 1).bool().equal((x * hyperplanes[:, bit]).sum(-1) > 0)
    assert hash_codes(5 * x, hyperplanes).equal(codes)
    assert hash_codes(-x, hyperplanes).equal(127 - codes)


@pytest.mark.parametrize("angle", [0.2, math.pi / 3, 2.5])
def test_vectors_at_an_angle_share_a_bit_with_probability_one_minus_the_angle_over_pi(angle):
    hyperplanes = normal(4, 62 * 200).view(4, 200, 62)
    pair = torch.zeros(2, 4, dtype=torch.float64)
    pair[0, 0], pair[1, 0], pair[1, 1] = 1, math.cos(angle), math.sin(angle)
    codes = torch.stack([hash_codes(pair, hyperplanes[:, i]) for i in range(200)], 1)
    shared = 1 - sum(differing_bits(*codes)) / (62 * 200)
    assert abs(shared - (1 - angle / math.pi)) < 0.02  # 4 standard deviations


def test_hashing_is_the_same_under_autocast_and_has_no_gradient():
    x, hyperplanes = normal(1000, 64).float().requires_grad_(), normal(64, 30, seed=1).float()
    codes = hash_codes(x, hyperplanes)
    with torch.autocast("cpu", torch.bfloat16):
        assert hash_codes(x, hyperplanes).equal(codes)
    assert not codes.requires_grad


def test_what_cannot_be_hashed_is_refused():
    with pytest.raises(ValueError, match="head_dim = 8"):
        hash_codes(normal(3, 8), normal(7, 5))
    with pytest.raises(ValueError, match="1 to 62"):
        hash_codes(normal(3, 8), normal(8, 63))
    with pytest.raises(TypeError, match="floating point"):
        hash_codes(torch.ones(3, 8, dtype=torch.int64), normal(8, 5))
    with pytest.raises(ValueError, match="one device"):
        hash_codes(normal(3, 8), normal(8, 5).to("meta"))
