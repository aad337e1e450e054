"""What campaigns share: their command line, and small folders to attack."""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polysketch.data import ReadOptions, prepare
from polysketch.training import TrainingConfig, train

REFUSALS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)
"""What a command tells in one line; anything else would be a traceback."""


@dataclass
class Found:
    """What came of a campaign.

    Attributes:
        outcomes: attacks by what came of them.
        faults: what should not be, in words.
        figures: what else the record says; nothing of most campaigns.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, attack: str, outcome: str, *, is_fault: bool = False) -> None:
        """Count one attack."""
        self.outcomes[outcome] += 1
        if is_fault:
            self.faults.append(f"{attack}: {outcome}")


def main(
    campaign: Callable[..., Found],
    about: str | None,
    count: int,
    argv: Sequence[str] | None = None,
    *,
    parts: Sequence[str] = (),
) -> int:
    """Run a campaign as the command line says, print what it found, and give its exit status.

    Args:
        campaign: of a number of attacks, a seed and an empty folder; and of the names of its parts, if it has any.
        about: its documentation.
        count: of attacks, where none is given.
        argv: the command line; None for the process's own.
        parts: what `--only` may name.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=count, help="attacks")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    options = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chosen = (options.only,) if parts else ()
        found = campaign(options.count, options.seed, Path(folder), *chosen)
    record: dict[str, Any] = {"count": options.count, "seed": options.seed, "outcomes": dict(found.outcomes)}
    if found.figures:
        record["figures"] = found.figures
    print(json.dumps({**record, "faults": found.faults, "seconds": round(time.monotonic() - started)}, indent=1))
    return 1 if found.faults else 0


def write_text(folder: Path) -> Path:
    """A little text, to be prepared."""
    folder.mkdir(parents=True)
    for number in range(12):
        lines = (f"{left} plus {number} is {left + number}." for left in range(60))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def prepare_text(text: Path, out: Path, tokenizer: str = "bpe:300") -> Path:
    """Prepare it."""
    options = ReadOptions(cut_text=0)
    prepare(text, tokenizer, out, validation_share=0.2, test_share=0.1, options=options, progress=False)
    return out


def training(data: Path, out: Path, **changes: Any) -> TrainingConfig:
    """Options of a run of about a second, which saves, evaluates and logs at every other step."""
    options: dict[str, Any] = {
        "data": data,
        "out": out,
        "preset": "tiny",
        "layers": 1,
        "attention": "polysketch-paper",
        "attention_options": {"sketch_size": 8, "local_chunk": 16, "prefix_gain": 0.5},
        "context": 48,
        "batch_size": 2,
        "steps": 8,
        "log_every": 1,
        "eval_every": 4,
        "eval_tokens": 100,
        "save_every": 2,
        "device": "cpu",
        "tensorboard": False,
    }
    return TrainingConfig(**options | changes)


def run_of(data: Path, out: Path, **changes: Any) -> Path:
    """Train one."""
    train(training(data, out, **changes), progress=False)
    return out
