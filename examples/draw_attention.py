"""Draw what attention sees, and what it remembers, from the mechanisms themselves.

    python examples/draw_attention.py [--out pictures]

The first picture has a square for each mechanism: row i are the weights that token i gives to the tokens before it.
They are read off the mechanism: with the j-th unit vector as the value of token j, its output at i is that row. The
second picture is the size of a state against the position, as the state itself tells it. It takes a few seconds.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from polysketch import attention, plotting

LENGTH, HEAD_DIM = 96, 64
SEEN = {
    "softmax": {},
    "sliding-window": {"window": 16},
    "local": {"local_chunk": 16},
    "linear": {},
    "polysketch-paper": {"local_chunk": 16, "learned": False},
    "polysketch": {"window": 16},
}
"""Mechanisms of the first picture, and their options: one of each kind of what is seen."""

REMEMBERED = {"softmax": {}, "polysketch": {}, "sliding-window": {}, "linear": {}}
"""Mechanisms of the second picture, as they are by default."""

POSITIONS = tuple(2**power for power in range(5, 14))
_DARKEST = 1e-3  # a share below it is white


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder for the pictures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (draw_seen, draw_remembered):
        print(draw(folder))


def weights(mechanism: attention.Mechanism, query: Tensor, key: Tensor) -> Tensor:
    """The weights that a mechanism gives, of shape (length, length), whatever it computes them by.

    Args:
        mechanism: of one head. Its output has to be linear in the values, as that of every mechanism here is.
        query, key: (1, 1, length, head_dim).
    """
    units = torch.eye(query.shape[2]).expand(1, 1, -1, -1)
    with torch.inference_mode():
        rows = [mechanism(query, key, part) for part in units.split(query.shape[-1], dim=-1)]
    return torch.cat(rows, dim=-1)[0, 0]


def some_queries_and_keys(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens that are somewhat like themselves 40 tokens before: far tokens matter, as in text that repeats."""
    torch.manual_seed(0)
    tokens = torch.randn(40, HEAD_DIM)[torch.arange(length) % 40]
    query, key = (tokens + 0.7 * torch.randn(length, HEAD_DIM) for _ in range(2))
    return query[None, None], key[None, None]


def build(name: str, options: dict) -> attention.Mechanism:
    """One head of a mechanism, as a model has it before training."""
    torch.manual_seed(0)
    return attention.build(name, num_heads=1, head_dim=HEAD_DIM, **options).eval()


def draw_seen(folder: Path) -> Path:
    """Write the picture of weights into a folder; returns the file."""
    query, key = some_queries_and_keys()
    file = folder / "what-attention-sees.png"
    title = f"Share of the attention of token i (down) at token j (across), {LENGTH} tokens; darker is more"
    with plotting.picture(file, (9, 6.2), rows=2, columns=3, title=title) as all_axes:
        for axes, (name, options) in zip(all_axes.flat, SEEN.items(), strict=True):
            shares = weights(build(name, options), query, key).abs()
            axes.imshow(shares.clamp(min=_DARKEST).log().numpy(), cmap="Blues", interpolation="nearest")
            axes.set_title(" ".join([name, *(f"{option}={value}" for option, value in options.items())]), fontsize=8)
            axes.tick_params(labelsize=7)
    return file


def state_bytes(mechanism: attention.Mechanism, positions: tuple[int, ...] = POSITIONS) -> list[int]:
    """Bytes of the state of one head after so many tokens."""
    state, before, sizes = mechanism.init_state(batch_size=1), 0, []
    with torch.inference_mode():
        for position in positions:
            query, key, value = torch.randn(3, 1, 1, position - before, HEAD_DIM)
            _, state = mechanism.extend(query, key, value, state)
            before = position
            sizes.append(state.nbytes)
    return sizes


def draw_remembered(folder: Path) -> Path:
    """Write the picture of states into a folder; returns the file."""
    file = folder / "memory-by-position.png"
    with plotting.picture(file, (7, 4)) as axes:
        for name, options in REMEMBERED.items():
            sizes = state_bytes(build(name, options))
            axes.plot(POSITIONS, [size / 1024 for size in sizes], "o-", markersize=3, label=name)
        plotting.powers_of_two(axes, POSITIONS)
        axes.set_yscale("log")
        labels = {"xlabel": "position (tokens)", "ylabel": "state of one head of 64 (KiB)"}
        plotting.finish(axes, **labels)
    return file


if __name__ == "__main__":
    main()
