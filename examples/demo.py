"""The whole library in a few minutes on a CPU: prepare, train, evaluate, time and generate, without any download.

    python examples/demo.py [--out demo] [--steps 250]

The text is the Python standard library's own source, which is on every machine. Two models are trained alike: one with
polysketch in every second layer, as the preset has it, and one that has windows alone. The demo fails (exit status 1)
if the first does not predict held-out files better than the second, and better than a count model of order 2, which
knows how often each byte followed each pair of bytes.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import torch

from count_models import CountModel
from polysketch import attention, cli
from polysketch.data import PreparedData

CONTEXT = 2048
WINDOW = 64
RUNS = {"run": (), "window": ("--attention", "sliding-window")}  # the first as the preset has it
HELD_OUT_TOKENS = 60_000
PROMPT = """import os


class Reader:
    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding

    def read(self"""
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def main() -> int:
    """Run every step; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for data, run and plots; replaced")
    parser.add_argument("--steps", type=int, default=250, help="training steps of each model: about a minute for 250")
    options = parser.parse_args()
    begun, out = time.perf_counter(), options.out
    shutil.rmtree(out, ignore_errors=True)
    title("1. Text: the Python standard library's own source")
    prepare(out)
    title(f"2. Training: polysketch in every second layer, windows of {WINDOW} tokens between; then windows alone")
    train(out, options.steps)
    title("3. Held-out files: bits per byte, the fewer the better")
    better = evaluate(out, options.steps)
    title("4. Forward time of attention on this machine, 4 heads of 64, a window of 256")
    compare_times(out)
    title("5. A class, continued")
    command("generate", str(out / "run"), "--prompt", PROMPT, "--max-new-tokens", "120", "--temperature", "0.7")
    failure = "" if better else ", but polysketch is NOT better than both its window and the counts of order 2"
    title(f"Done in {time.perf_counter() - begun:.0f} s{failure}")
    for name in (
        "run/loss.png",
        "run_loss_by_position.png",
        "forward_time.png",
        "run/metrics.jsonl",
        "run/checkpoints",
    ):
        print(f"  {out / name}")
    return 0 if better else 1


def title(text: str) -> None:
    """Announce a step."""
    print(f"\n== {text}", flush=True)


def command(*arguments: str) -> None:
    """Run a command of the library as it would be typed; stop the demo if it fails."""
    print(
        "$ polysketch " + " ".join(repr(word) if {"\n", " ", "*"} & set(word) else word for word in arguments),
        flush=True,
    )
    status = cli.main(list(arguments))
    if status:
        sys.exit(status)


def prepare(out: Path) -> None:
    """Tokens of the standard library, without its tests."""
    source = sysconfig.get_paths()["stdlib"]
    patterns = ("site-packages/*", "*/site-packages/*", "test/*", "*/test/*", "*/tests/*")
    command("prepare", source, "--exclude", *patterns, "--tokenizer", "bpe:2048", "--out", str(out / "data"),
            "--undecodable", "skip", "--max-text-bytes", "12000000", "--tokenizer-text-bytes", "3000000")  # fmt: skip


def train(out: Path, steps: int) -> None:
    """Two small models, alike but for attention; a window of text a step."""
    for run, attention_of_run in RUNS.items():
        command("train", "--data", str(out / "data"), "--out", str(out / run), "--preset", "tiny",
                *attention_of_run, "--attention-options", f"window={WINDOW}", "--context", str(CONTEXT),
                "--batch-size", "1", "--optimizer", "muon", "--learning-rate", "1e-2", "--steps", str(steps),
                "--log-every", "10", "--eval-every", str(max(1, steps // 3)), "--eval-tokens", "16384")  # fmt: skip


def evaluate(out: Path, steps: int) -> bool:
    """Bits per byte of both models beside those of count models; whether the first beats its window and order 2."""
    far, near = (bits_per_byte(out, run) for run in RUNS)
    data = PreparedData.open(out / "data")
    known = data.tokenizer.decode_bytes(data.split("train").tokens.tolist())
    text = data.tokenizer.decode_bytes(data.split("test").tokens[:HELD_OUT_TOKENS].tolist())
    counted = [CountModel(known, order).bits_per_byte(text) for order in (1, 2, 3)]
    rows = [(f"count model, order {order}", bits) for order, bits in enumerate(counted, 1)]
    for name, bits in [*rows, ("window alone", near), ("polysketch", far)]:
        print(f"  {name:<22}{bits:6.3f} bits per byte  {'#' * round(bits * 10)}")
    print(
        f"  after {steps} steps of {CONTEXT} tokens, what is beyond the window is worth {near - far:.3f} bits per byte"
    )
    return far < min(near, counted[1])


def bits_per_byte(out: Path, run: str) -> float:
    """Of a model on held-out text; with a plot of the loss by position."""
    heard, plot = io.StringIO(), out / f"{run}_loss_by_position.png"
    with contextlib.redirect_stdout(heard):
        command("evaluate", str(out / run), "--split", "test", "--max-tokens", str(HELD_OUT_TOKENS),
                "--plot", str(plot), "--json")  # fmt: skip
    *lines, figures = heard.getvalue().splitlines()
    print("\n".join(lines), flush=True)
    return json.loads(figures)["bits_per_byte"]


def compare_times(out: Path) -> None:
    """Forward time of both mechanisms at growing lengths, alternating; a table and a plot."""
    softmax = attention.build("softmax", num_heads=4, head_dim=64)
    polysketch = attention.build("polysketch", num_heads=4, head_dim=64)
    print(f"  {'tokens':>8}{'softmax':>12}{'polysketch':>12}{'ratio':>8}")
    rows = []
    for length in LENGTHS:
        inputs = [torch.randn(1, 4, length, 64) for _ in range(3)]
        times = [(_seconds(softmax, inputs), _seconds(polysketch, inputs)) for _ in range(3)]
        first, second = (sorted(column)[1] for column in zip(*times, strict=True))
        rows.append((length, first, second))
        print(f"  {length:>8}{first * 1e3:>9.1f} ms{second * 1e3:>9.1f} ms{first / second:>7.1f}x", flush=True)
    _plot_times(out / "forward_time.png", rows)


@torch.inference_mode()
def _seconds(mechanism: torch.nn.Module, inputs: list[torch.Tensor]) -> float:
    begun = time.perf_counter()
    mechanism(*inputs)
    return time.perf_counter() - begun


def _plot_times(path: Path, rows: list[tuple[int, float, float]]) -> None:
    """Time per token against length, both axes logarithmic: flat is linear time."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, column in (("softmax", 1), ("polysketch", 2)):
        axes.loglog([row[0] for row in rows], [row[column] / row[0] * 1e6 for row in rows], marker="o", label=name)
    axes.set(xlabel="tokens", ylabel="microseconds per token", title="Forward pass of attention, 4 heads of 64")
    axes.set_xticks([row[0] for row in rows], [f"{row[0] // 1024}k" for row in rows])
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
