"""What a checkpoint costs a run: seconds that training stands still, written while it waits and while it goes on.

    python -m benchmarks.saving                             presets tiny and gpt2-small, on this machine's CPU
    python -m benchmarks.saving --presets tiny --repeats 5 --threads 1 --folder /data/tmp --out /tmp/some.json

Every round makes steps beside nothing, then one checkpoint that training waits for, then one that is written beside the
next steps, for which training waits only while it is copied. Figures are medians over the rounds. Writes
benchmarks/results/saving-TIME.json.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save
from polysketch.distributed.processes import Processes
from polysketch.models import TransformerLM, preset
from polysketch.training.checkpoint import Checkpoint, checkpoint_name, save_checkpoint
from polysketch.training.options import StepOptions
from polysketch.training.saving import Saver
from polysketch.training.step import Updater
from polysketch.training.tensors import optimizer_tensors, random_tensors

_ALONE_STEPS = 3
_ROWS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        "benchmark": "saving",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
        "measurements": [],
    }
    path = arguments.out or RESULTS / stamped("saving", ".json")
    for name in arguments.presets:
        report["measurements"].append(measure(name, arguments.context, arguments.repeats, arguments.folder))
        save({**report, "load_after": load()}, path)
        print_table([{key: str(value) for key, value in report["measurements"][-1].items()}])
    print(f"record: {path}")
    return 0


def measure(name: str, context: int, repeats: int, folder: Path | None) -> dict[str, Any]:
    """The figures of one preset, in seconds."""
    torch.manual_seed(0)
    model = TransformerLM(preset(name, attention="polysketch"))
    updater = Updater(model, StepOptions(steps=10**6, warmup=0, learning_rate=1e-4), torch.float32)
    batch = torch.randint(model.config.vocab_size, (_ROWS, context + 1))
    step = Steps(updater, batch)
    with tempfile.TemporaryDirectory(dir=folder) as place, Saver(Path(place), 1, Processes()) as saver:
        step.once()  # makes the moments
        rounds = [one_round(step, saver, Path(place)) for _ in range(repeats + 1)][1:]
    figures = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    ratios = {
        "waiting_over_copy": statistics.median(each["waiting"] / each["copy"] for each in rounds),
        "step_beside_over_step": statistics.median(each["step_beside"] / each["step"] for each in rounds),
    }
    size = {"preset": name, "parameters": model.num_parameters(), "tokens": _ROWS * context, "rounds": repeats}
    return size | {key: round(value, 4) for key, value in (figures | ratios).items()}


def one_round(step: "Steps", saver: Saver, folder: Path) -> dict[str, float]:
    """One checkpoint of each kind.

    Returns:
        Seconds of a step beside nothing; of a checkpoint that is waited for; of the copy of one that is not; of a step
        beside its writing; until it was written.
    """
    alone = statistics.median(step.once() for _ in range(_ALONE_STEPS))
    waiting = _seconds(lambda: save_checkpoint(folder, step.checkpoint(), keep=1))
    step.once()
    copy = _seconds(lambda: saver.begin(step.checkpoint(), before=lambda: None))
    started, beside = time.perf_counter(), []
    while not beside or not (folder / checkpoint_name(saver.step or 0)).exists():
        beside.append(step.once())
    written = time.perf_counter() - started
    saver.wait()
    return {
        "step": alone,
        "waiting": waiting,
        "copy": copy,
        "step_beside": statistics.median(beside),
        "written_after": written,
    }


class Steps:
    """Steps of training on one batch, and checkpoints of them."""

    def __init__(self, updater: Updater, batch: torch.Tensor) -> None:
        self._updater, self._batch, self._made = updater, batch, 0

    def once(self) -> float:
        """Seconds of one step."""
        self._made += 1
        return _seconds(self._step)

    def _step(self) -> None:
        self._updater.compute_gradient(self._batch)
        self._updater.apply(self._made)

    def checkpoint(self) -> Checkpoint:
        """What a run would save now."""
        updater = self._updater
        tensors = optimizer_tensors(updater.model, updater.optimizer)
        return Checkpoint(updater.model.state_dict(), tensors, random_tensors(), {"step": self._made})


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--presets", nargs="+", default=["tiny", "gpt2-small"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write checkpoints, a disk of the kind that runs are on")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
