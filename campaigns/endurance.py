"""Long work: memory that stays flat, and no file, thread or temporary name left behind.

    python -m campaigns.endurance --count 10000 --seed 0

`--count` is of training steps, of tens of decoded tokens, of calls of operators by four threads at once, of calls in
the workers of PyTorch's data loaders, of compiled calls, and of calls with and without autocast in turn; a fiftieth as
many calls are interrupted by an exception at a random moment, and a fiftieth as many processes are forked off after
use. A thousandth as often three new interpreters compute at once. What is a fault: resident memory in the last fifth of
the time more than 2 % above that in the second fifth, an open file, thread or process more than after a first, short
round, a file left among temporary ones, and another result.
"""

import contextlib
import functools
import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from campaigns.harness import Found, main, prepare_text, run_of, write_text
from polysketch import attention, ops
from polysketch.generation import generate
from polysketch.models import TransformerLM, preset

_GROWTH = 1.02
_BETWEEN = 0.02  # seconds between two looks at memory
_SECONDS_TO_SETTLE = 5.0
_FEW = 40  # steps of the first round, which starts threads, compiles and fills caches
_EACH_LOADER = 100  # results of one data loader, whose workers end with it
_INTERPRETERS = 3
_TIMES = 10  # that a new interpreter computes every result
_PROGRAM = "from campaigns.endurance import answer; answer({times}, {names})"

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


def workers(count: int, folder: Path, random_: random.Random) -> None:
    """Data loaders one after the other, each with two workers forked off after use, whose items are our results."""
    _results()  # by all threads, which a fork does not have
    expected = {name: _digest_of([result]) for name, result in _results_of_one_thread().items()}
    for start in range(0, count, _EACH_LOADER):
        results = _Results([_NAMES[number % len(_NAMES)] for number in range(start, min(start + _EACH_LOADER, count))])
        loader = DataLoader(results, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=100)
        for name, found in zip(results.names, loader, strict=True):
            assert found == expected[name], f"{name}: another result in a worker of a data loader"


def compiled(count: int, folder: Path, random_: random.Random) -> None:
    """Operators and mechanisms by torch.compile, each with its gradient in one graph."""
    expected = {name: _compiled_result(name) for name in _NAMES}
    for name, plain in _results().items():
        torch.testing.assert_close(expected[name], plain, rtol=1e-4, atol=1e-4, msg=f"{name}: another result compiled")
    for number in range(count):
        name = _NAMES[number % len(_NAMES)]
        assert torch.equal(_compiled_result(name), expected[name]), f"{name}: another result than compiled before"


def autocast(count: int, folder: Path, random_: random.Random) -> None:
    """With autocast to bfloat16 and without it in turn: neither leaves anything to the other."""
    expected = [_results(), _results_of_autocast()]
    assert any(not torch.equal(*(each[name] for each in expected)) for name in _NAMES), "autocast changed nothing"
    for number in range(count):
        name, enabled = _NAMES[number % len(_NAMES)], number % 2
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(enabled)):
            found = _result(name)
        assert torch.equal(found, expected[enabled][name]), f"{name}: another result beside autocast"


def processes(count: int, folder: Path, random_: random.Random) -> None:
    """New interpreters, which load the native programs and compute at the same time."""
    expected = _digest(_NAMES)
    for _ in range(max(1, count // 1000)):
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(_interpreter()) for _ in range(_INTERPRETERS)]
            told = [_line(process) for process in started]
            assert told == ["ready"] * len(started), f"new interpreters began with {told}"
            for process in started:
                _tell(process)
            for process in started:
                found = _line(process)
                assert found == expected, f"another result in a new interpreter: {found!r}"
        assert all(process.returncode == 0 for process in started), "a new interpreter ended with another status than 0"


PARTS: dict[str, Work] = {
    "training": training,
    "decoding": decoding,
    "calls": calls,
    "interruptions": interruptions,
    "forks": forks,
    "workers": workers,
    "compiled": compiled,
    "autocast": autocast,
    "processes": processes,
}

_NAMES = ("polysketch", "polysketch-paper", "polysketch-window", "performer", "linear", "hyper", "given features")


def _results() -> dict[str, torch.Tensor]:
    return {name: _result(name) for name in _NAMES}


def _results_of_one_thread() -> dict[str, torch.Tensor]:
    """As a worker of a data loader has them: PyTorch gives it one thread, and other numbers of them round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _results()
    finally:
        torch.set_num_threads(threads)


def _results_of_autocast() -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return _results()


def _result(name: str) -> torch.Tensor:
    return _output_and_gradient(_attending(name))


def _compiled_result(name: str) -> torch.Tensor:
    return _output_and_gradient(_compiled(name))


Attending = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _output_and_gradient(attend: Attending) -> torch.Tensor:
    """An output, and the gradient by its queries, of inputs that are always the same."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 192, 16, generator=generator) for _ in range(3))
    query.requires_grad_()
    output = attend(query, key, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    return torch.cat([output.detach(), gradient], -1)


@functools.cache
def _attending(name: str) -> Attending:
    if name == "given features":
        return _attend_to_features
    torch.manual_seed(0)
    options = {"seed": 0} if name == "performer" else {}
    return attention.build(name, num_heads=2, head_dim=16, **options)


def _attend_to_features(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ops.linear_attention(query, key, value, power=2, causal=True, offset=1.0).output


@functools.cache
def _compiled(name: str) -> Attending:
    """By the backend of torch.compile that traces outputs and gradients, and needs no compiler of its own."""
    return torch.compile(_attending(name), backend="aot_eager", fullgraph=True)


class _Results(Dataset[str]):
    """Digests of results by number, to be computed by whoever asks.

    PyTorch passes tensors by sockets among the temporary files, whose names may be too long for one in a deep folder.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> str:
        return _digest([self.names[number]])


def answer(times: int, names: Sequence[str]) -> None:
    """What a new interpreter does: say that it is ready, wait for a line, compute, and tell the digests it found."""
    print("ready", flush=True)
    sys.stdin.readline()
    print(*sorted({_digest(names) for _ in range(times)}), flush=True)


def _digest(names: Sequence[str]) -> str:
    """Of the bits of all results."""
    return _digest_of(map(_result, names))


def _digest_of(results: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for result in results:
        found.update(result.numpy().tobytes())
    return found.hexdigest()


def _interpreter() -> "subprocess.Popen[str]":
    """A new one, with as many threads as this process."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, (str(root), str(root / "src"), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(times=_TIMES, names=_NAMES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _tell(process: "subprocess.Popen[str]") -> None:
    """Let it go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


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
    return {**found, "temporary files": len(os.listdir(tempfile.gettempdir())), "processes": _children()}


def _children() -> int:
    """Processes that this one started, those that ended and were not waited for too."""
    number = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is over
            number += int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid()
    return number


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
