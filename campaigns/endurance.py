"""Long work: memory that stays flat, and no file, thread or temporary name left behind.

    python -m campaigns.endurance --count 10000 --seed 0

`--count` is of training steps, of tens of decoded tokens, of calls of operators by four threads at once; a fiftieth as
many calls are interrupted by an exception at a random moment, and a fiftieth as many processes are forked off after
use. What is a fault: resident memory in the last fifth of the time more than 2 % above that in the second fifth, an
open file or thread more than after a first, short round, a file left among temporary ones, and another result.
"""

import functools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from campaigns.harness import Found, main, prepare_text, run_of, write_text
from polysketch import attention, ops
from polysketch.generation import generate
from polysketch.models import TransformerLM, preset

_GROWTH = 1.02
_BETWEEN = 0.02  # seconds between two looks at memory
_SECONDS_TO_SETTLE = 5.0
_FEW = 40  # steps of the first round, which starts threads, compiles and fills caches

Work = Callable[[int, Path, random.Random], None]


def training(count: int, folder: Path, random_: random.Random) -> None:
    """Steps, evaluations and checkpoints of one run."""
    prepared = folder / "prepared"
    if not prepared.exists():
        prepare_text(write_text(folder / "text"), prepared)
    often = max(1, count // 20)
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    run_of(prepared, out, steps=count, log_every=often, eval_every=often, save_every=often)


def decoding(count: int, folder: Path, random_: random.Random) -> None:
    """Ten tokens for each of the count, one after the other, of a state of constant size."""
    torch.manual_seed(0)
    model = TransformerLM(preset("tiny", num_layers=1, attention_options={"window": 32})).eval()
    tokens = generate(model, [[1, 2, 3]], max_new_tokens=10 * count, seed=random_.randrange(2**31)).tokens[0]
    assert len(tokens) == 10 * count, f"expected {10 * count} tokens, found {len(tokens)}"


def calls(count: int, folder: Path, random_: random.Random) -> None:
    """Operators with their gradients, called by four threads at once."""
    expected = _results()

    def call(number: int) -> None:
        name = _NAMES[number % len(_NAMES)]
        assert torch.equal(_result(name), expected[name]), f"{name}: another result than alone"

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(call, range(count)):
            pass


def interruptions(count: int, folder: Path, random_: random.Random) -> None:
    """An exception at a random moment of a call, which native threads may be working for."""
    expected, beside = _results(), torch.zeros(2**20)
    for number in range(max(1, count // 50)):
        name = _NAMES[number % len(_NAMES)]
        _interrupt(random_.uniform(1e-5, 5e-3), functools.partial(_result, name))
        assert torch.equal(_result(name), expected[name]), f"{name}: another result after an interruption"
    assert not beside.any(), "memory beside the results was written"


def forks(count: int, folder: Path, random_: random.Random) -> None:
    """A process that is forked off after use, and computes."""
    expected = _results()
    for number in range(max(1, count // 50)):
        name = _NAMES[number % len(_NAMES)]
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if torch.equal(_result(name), expected[name]) else 3)
            finally:
                os._exit(4)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"{name}: a forked process ended with {status}"


PARTS: dict[str, Work] = {
    "training": training,
    "decoding": decoding,
    "calls": calls,
    "interruptions": interruptions,
    "forks": forks,
}

_NAMES = ("polysketch", "polysketch-paper", "polysketch-window", "performer", "linear", "hyper", "given features")


def _results() -> dict[str, torch.Tensor]:
    return {name: _result(name) for name in _NAMES}


def _result(name: str) -> torch.Tensor:
    """An output, and the gradient by its queries, of inputs that are always the same."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 192, 16, generator=generator) for _ in range(3))
    query.requires_grad_()
    if name == "given features":
        output = ops.linear_attention(query, key, value, power=2, causal=True, offset=1.0).output
    else:
        output = _mechanism(name)(query, key, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    return torch.cat([output.detach(), gradient], -1)


_mechanisms: dict[str, torch.nn.Module] = {}


def _mechanism(name: str) -> torch.nn.Module:
    if name not in _mechanisms:
        torch.manual_seed(0)
        options = {"seed": 0} if name == "performer" else {}
        _mechanisms[name] = attention.build(name, num_heads=2, head_dim=16, **options)
    return _mechanisms[name]


class _Interruption(Exception):
    """What comes in the middle of a call."""


def _interrupt(seconds: float, work: Callable[[], object]) -> None:
    """Call something, and let an exception come after so long, if it takes that long."""

    def interrupt(number: int, frame: object) -> None:
        raise _Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _Interruption:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)


class Memory:
    """Looks at the resident memory of the process while something goes on."""

    def __init__(self) -> None:
        self.megabytes: list[float] = []
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE") / 1e6
        while not self._over.wait(_BETWEEN):
            self.megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * page)

    def growth(self) -> float:
        """The median of the last fifth over that of the second; 1 where it was too short to tell."""
        fifth = len(self.megabytes) // 5
        if fifth < 5:
            return 1.0
        return statistics.median(self.megabytes[-fifth:]) / statistics.median(self.megabytes[fifth : 2 * fifth])


def kept() -> dict[str, int]:
    """What a process may forget to give back."""
    names = {"open files": "/proc/self/fd", "threads": "/proc/self/task"}
    found = {name: len(os.listdir(path)) for name, path in names.items()}
    return {**found, "temporary files": len(os.listdir(tempfile.gettempdir()))}


def campaign(count: int, seed: int, folder: Path, only: list[str] | None = None) -> Found:
    """Every part, at its length.

    Args:
        count: see above.
        seed: of moments and texts.
        folder: an empty one; temporary files of the process go into it meanwhile.
        only: names of parts; None for all.
    """
    found = Found()
    (folder / "temporary").mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder / "temporary")
    try:
        for name in only or PARTS:
            _attack(name, count, seed, folder, found)
    finally:
        tempfile.tempdir = before
    return found


def _attack(name: str, count: int, seed: int, folder: Path, found: Found) -> None:
    work, random_ = PARTS[name], random.Random(seed)
    try:
        work(min(count, _FEW), folder, random_)
        at_first = kept()
        with Memory() as memory:
            work(count, folder, random_)
    except AssertionError as error:
        found.add(name, str(error), is_fault=True)
        return
    growth = memory.growth()
    found.add(name, f"{name}: memory grew by {growth - 1:.2%}", is_fault=growth > _GROWTH)
    for thing, number in _settled(at_first).items():
        if number > at_first[thing]:
            found.add(name, f"{number - at_first[thing]} more {thing}", is_fault=True)


def _settled(at_first: dict[str, int]) -> dict[str, int]:
    """What is kept once threads that are ending have ended: they need a moment, or the time is over."""
    end = time.monotonic() + _SECONDS_TO_SETTLE
    while any(number > at_first[thing] for thing, number in kept().items()) and time.monotonic() < end:
        time.sleep(0.01)
    return kept()


if __name__ == "__main__":
    sys.exit(main(campaign, __doc__, 10_000, parts=tuple(PARTS)))
