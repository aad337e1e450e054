"""How this process was started: alone, or as one of several by torchrun or in its manner."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the environment says; the names of its variables are PyTorch's own.

    Attributes:
        rank: number of this process among all, from 0.
        count: number of processes.
        local_rank: number of this process among those of its machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0


def find_launch() -> Launch:
    """How this process was started.

    Raises:
        ValueError: the variables hold something else than numbers that fit one another.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Launch()
    found = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not all(value.isdecimal() for value in found.values()) or int(found["RANK"]) >= int(found["WORLD_SIZE"]):
        listed = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"expected RANK below WORLD_SIZE and LOCAL_RANK in the environment, found {listed}")
    return Launch(int(found["RANK"]), int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"]))
