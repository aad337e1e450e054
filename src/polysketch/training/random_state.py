"""The states of PyTorch's random generators, as tensors."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed the generators of the CPU and of every CUDA device."""
    torch.manual_seed(seed)


def random_tensors() -> dict[str, Tensor]:
    """The states of the generators: `cpu`, and `cuda.N` for each CUDA device that is there; uint8 vectors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def load_random_tensors(states: Mapping[str, Tensor]) -> None:
    """Put the generators back into `states`; those of CUDA devices that are not here are left out.

    Raises:
        ValueError: the state of the CPU's generator is missing or of another size.
    """
    expected = torch.get_rng_state()
    found = states.get("cpu")
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"expected the state of the CPU's random generator, {len(expected)} bytes, in the checkpoint, found "
            f"{'none' if found is None else tuple(found.shape)}: it was written by another version of PyTorch"
        )
    torch.set_rng_state(found)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


@contextlib.contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Leave the generators, at the end, as they were: what is measured during training must not change training."""
    states = random_tensors()
    try:
        yield
    finally:
        load_random_tensors(states)
