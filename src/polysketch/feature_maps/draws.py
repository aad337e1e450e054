"""Random numbers for buffers, and seeds that go on from draw to draw."""

import torch
from torch import Tensor

LARGEST_SEED = 2**63 - 1


def draw_normal_(buffer: Tensor, generator: torch.Generator | None) -> None:
    """Fill with unit normals: from `generator`, on its device, or from the default one."""
    if generator is None:
        buffer.normal_()
        return
    buffer.copy_(torch.randn(buffer.shape, generator=generator, device=generator.device))


def draw_below_(buffer: Tensor, bound: int, generator: torch.Generator | None) -> None:
    """Fill with uniform whole numbers from 0 to bound - 1: from `generator`, on its device, or from the default one."""
    device = buffer.device if generator is None else generator.device
    buffer.copy_(torch.randint(bound, buffer.shape, generator=generator, device=device))


def seed_or_default(seed: int | None) -> int:
    """The seed, or, where it is None, one from PyTorch's default generator.

    Raises:
        TypeError, ValueError: it is no integer from 0 to `LARGEST_SEED`.
    """
    if seed is None:
        return int(torch.randint(LARGEST_SEED, (), device="cpu"))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
    return seed


def begin_draw(seed: int, next_seed: Tensor) -> torch.Generator:
    """A generator of this seed; that of the draw after it goes into `next_seed`, () int64."""
    generator = torch.Generator().manual_seed(seed)
    next_seed.copy_(torch.randint(LARGEST_SEED, (), generator=generator))
    return generator
