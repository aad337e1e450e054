"""The mean loss of a training step with logits made once, and as before, with logits made again in backward.

    python -m benchmarks.mean_loss                        presets tiny and mini at 2k and 16k tokens, one thread
    python -m benchmarks.mean_loss --cases tiny:2048 --repeats 5 --out /tmp/some.json

Steps alternate in one process, which counts the seconds that it computed itself, for a machine that others use too.
Errors are those of the loss and of each gradient from float64, by the norm. Peak memory is that of a process of its own
that makes the loss and its gradients of random hidden states. Writes benchmarks/results/mean-loss-TIME.json.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.journal import stamped
from benchmarks.packed import OwnClock
from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save
from polysketch.models import TransformerLM, mean_token_loss, preset, token_losses, transformer_lm

_ALONE = {"vocab_size": 8192, "hidden_size": 384, "tokens": 4096}
_PEAK = """
import sys
from benchmarks import mean_loss
tensors = mean_loss.random_tensors(*map(int, sys.argv[2:]))
mean_loss.gradients(mean_loss.WAYS[sys.argv[1]], tensors)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
"""


def _before(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return token_losses(hidden, weight, bias, targets).mean()


WAYS: dict[str, Callable[..., Tensor]] = {"before": _before, "after": mean_token_loss}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 0."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    path = arguments.out or RESULTS / stamped("mean-loss", ".json")
    report: dict[str, Any] = {
        "benchmark": "mean loss",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
        "alone": _ALONE,
        "errors": errors(*_ALONE.values()),
        "peak_megabytes": {way: peak_megabytes(way, *_ALONE.values()) for way in WAYS},
        "steps": [],
    }
    for case in arguments.cases:
        name, tokens = case.split(":")
        report["steps"].append(steps(name, int(tokens), arguments.repeats))
        save({**report, "load_after": load()}, path)
        print_table([{key: str(value) for key, value in report["steps"][-1].items() if key != "seconds"}])
    print(f"errors: {report['errors']}\npeak: {report['peak_megabytes']}\nrecord: {path}")
    return 0


def steps(name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """How much faster a training step of a preset is with logits made once."""
    torch.manual_seed(0)
    model = TransformerLM(preset(name, attention="polysketch"))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1))

    def step(way: str) -> None:
        transformer_lm.mean_token_loss = WAYS[way]  # type: ignore[assignment]
        optimizer.zero_grad()
        model.loss(ids).backward()
        optimizer.step()

    calls = {way: lambda way=way: step(way) for way in WAYS}
    seconds = OwnClock(torch.device("cpu")).alternate(calls, repeats=repeats)
    transformer_lm.mean_token_loss = mean_token_loss
    pairs = zip(seconds["before"], seconds["after"], strict=True)
    ratio = statistics.median(before / after for before, after in pairs)
    return {"preset": name, "tokens": tokens, "times_as_fast": round(ratio, 3), "seconds": seconds}


def random_tensors(vocab_size: int, hidden_size: int, tokens: int) -> list[Tensor]:
    """Hidden states, weight, bias and targets."""
    torch.manual_seed(0)
    shapes = ((1, tokens, hidden_size), (vocab_size, hidden_size), (vocab_size,))
    hidden, weight, bias = (torch.randn(shape) for shape in shapes)
    leaves = (hidden, weight * hidden_size**-0.5, bias)
    return [*(each.requires_grad_() for each in leaves), torch.randint(vocab_size, (1, tokens))]


def gradients(way: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The loss, and its gradients by hidden states, weight and bias."""
    loss = way(*tensors)
    return [loss.detach(), *torch.autograd.grad(loss, tensors[:3])]


def errors(*sizes: int) -> dict[str, dict[str, float]]:
    """Distances from float64, relative to its norm."""
    tensors = random_tensors(*sizes)
    exact = gradients(_before, [*(each.detach().double().requires_grad_() for each in tensors[:3]), tensors[3]])
    names = ("loss", "hidden", "weight", "bias")
    return {
        way: {
            name: float((one - other).norm() / other.norm())
            for name, one, other in zip(names, gradients(function, tensors), exact, strict=True)
        }
        for way, function in WAYS.items()
    }


def peak_megabytes(way: str, *sizes: int) -> float:
    """The most resident memory of a process that makes the loss and its gradients, on Linux."""
    command = [sys.executable, "-c", _PEAK, way, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(int(done.stdout) / 1024, 1)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=["tiny:2048", "mini:2048", "tiny:16384", "mini:16384"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
