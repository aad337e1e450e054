"""What states in half precision cost a trained model: its loss, token by token, against states in float32.

    python -m benchmarks.half_states RUN --tokens 4096 --rows 4

RUN is a training run. Rows stand evenly in its test split. Every token is read by itself, so that sums are rounded as
often as they can be. Writes benchmarks/results/half-states-TIME.json: for each dtype the mean loss of the second half
of each doubling of the context, how much more that is than with float32, and the root mean square over tokens.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch.benchmarking.environment import environment
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save
from polysketch.data import PreparedData
from polysketch.models import TransformerLM
from polysketch.progress import Progress
from polysketch.studies.held_out import held_out_windows
from polysketch.training import load_model

DTYPES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FIRST = 128  # the shortest context that has a line


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    model, description = load_model(arguments.run, device="cpu")
    windows = held_out_windows(PreparedData.open(description.data), arguments.tokens, arguments.rows)
    found = measured(model, torch.from_numpy(windows.astype(np.int64)))
    report = {
        "benchmark": "states in half precision",
        "environment": environment(torch.device("cpu")),
        "model": {"attention": model.config.attention, "attention_every": model.config.attention_every},
        "tokens": arguments.tokens,
        "rows": arguments.rows,
        "found": found,
    }
    path = arguments.out or RESULTS / stamped("half-states", ".json")
    save(report, path)
    print_table([_row(dtype, one) for dtype, of_dtype in found.items() for one in of_dtype["losses"]])
    print(f"state, bytes a row: { {dtype: one['state_bytes'] for dtype, one in found.items()} }; {path}")
    return 0


def measured(model: TransformerLM, ids: Tensor) -> dict[str, Any]:
    """Losses and bytes by the names of `DTYPES`; ids (rows, tokens + 1)."""
    losses, found = {}, {}
    for dtype, kept in DTYPES.items():
        model.keep_states_in(kept)
        losses[dtype], state_bytes, seconds = read(model, ids, dtype)
        found[dtype] = {"state_bytes": state_bytes // len(ids), "seconds": round(seconds, 1)}
        found[dtype]["losses"] = list(_by_context(losses[dtype], losses["float32"]))
    return found


def read(model: TransformerLM, ids: Tensor, label: str) -> tuple[Tensor, int, float]:
    """(rows, tokens) losses, the bytes of the state and the seconds that it took, a token at a time."""
    state, losses, started = model.init_state(len(ids)), [], time.perf_counter()
    with torch.inference_mode(), Progress(total=ids.shape[1] - 1, unit="tokens") as progress:
        for token in range(ids.shape[1] - 1):
            hidden, state = model.extend_hidden(ids[:, token : token + 1], state)
            losses.append(model.token_losses(hidden, ids[:, token + 1 : token + 2]))
            progress.update(token + 1, label)
    return torch.cat(losses, 1).double(), state.nbytes, time.perf_counter() - started


def _by_context(losses: Tensor, exact: Tensor) -> Any:
    """The tokens of the second half of each doubling of the context."""
    length = _FIRST
    while length <= losses.shape[1]:
        part = slice(length // 2, length)
        more = losses[:, part] - exact[:, part]
        yield {
            "context": length,
            "loss": float(losses[:, part].mean()),
            "more": float(more.mean()),
            "rms": float(more.square().mean().sqrt()),
        }
        length *= 2


def _row(dtype: str, one: dict[str, Any]) -> dict[str, str]:
    return {
        "state": dtype,
        "context": f"{one['context']:,}",
        "loss": f"{one['loss']:.4f}",
        "more": f"{one['more']:+.5f}",
        "rms": f"{one['rms']:.5f}",
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
