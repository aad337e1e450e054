"""What the processes of the tests do. Whatever they need is imported here, once, in the server that they come from."""

import contextlib
import dataclasses
import errno
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.launching import command, die, freeze
from polysketch.distributed import ContextGroup, ContextPlan
from polysketch.distributed.processes import Processes, joined
from polysketch.distributed.shares import gathered, whole
from polysketch.storage import disk
from polysketch.training import TrainingConfig, step, train, trainer
from polysketch.training.checkpoint import Checkpoint
from polysketch.training.start import make_plan
from polysketch.training.step import Updater
from polysketch.training.tensors import trained_parameters
from polysketch.training.trainer import _share_out, build_model

torch.set_num_threads(1)
if "pytest" not in sys.modules:  # which imports this file, too
    trainer.plot_loss = lambda lines, path: False  # the tests of training look at plots


def gradient_of(config: TrainingConfig, processes: Processes) -> dict[str, torch.Tensor]:
    """Gradients of the first batch in float64, whole, with the loss and the norm."""
    torch.manual_seed(0)
    plan = make_plan(config, processes)
    model = build_model(plan).double()
    _share_out(model, processes)
    updater = Updater(model, plan.config.step_options(), torch.float32, processes)
    gradient = updater.compute_gradient(plan.goal.rows().batch(0, config.batch_size))
    found = {name: whole(parameter.grad) for name, parameter in trained_parameters(model).items()}
    figures = torch.tensor([gradient.loss, gradient.norm, gradient.tokens], dtype=torch.float64)
    return {name: tensor.clone() for name, tensor in found.items()} | {"figures": figures}


def gradients(mesh: str, configs: list[TrainingConfig], mutant: str | None) -> list[Any]:
    """The gradients for each configuration, from the first process."""
    with joined(mesh, "cpu") as processes, MUTANTS[mutant](), mock.patch.object(step, "_TILE", 32):
        found = [gradient_of(config, processes) for config in configs]
        return [{name: tensor.numpy() for name, tensor in each.items()} for each in found if processes.is_first]


def traffic(mesh: str, configs: list[TrainingConfig]) -> list[tuple[dict[str, int], int]]:
    """Of one gradient for each configuration: collectives by name, and the bytes of states and sums."""
    with joined(mesh, "cpu") as processes:
        return [_traffic_of(config, processes) for config in configs]


def _traffic_of(config: TrainingConfig, processes: Processes) -> tuple[dict[str, int], int]:
    plan = make_plan(config, processes)
    model = build_model(plan)
    _share_out(model, processes)
    updater = Updater(model, config.step_options(), torch.float32, processes)
    batch, before = plan.goal.rows().batch(0, config.batch_size), processes.context.traffic.bytes
    with _Collectives() as seen:
        updater.compute_gradient(batch)
    return dict(seen.counts), processes.context.traffic.bytes - before


class _Collectives(TorchDispatchMode):
    """Counts collectives by name. PyTorch's `CommDebugMode` loses its way where a layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def _local_means() -> Any:
    """Every share counts alike, however many tokens it predicts."""
    right = Updater._accumulate

    def accumulate(self: Any, part: Any, total: int, *, last: bool) -> Any:
        from polysketch.training.step import _predicted

        shares = self._processes.data_count * self._options.accumulation
        return right(self, part, _predicted(self._share(part)) * shares, last=last)

    return mock.patch.object(Updater, "_accumulate", accumulate)


def _averaged() -> Any:
    """Gradients are divided by the number of processes, which their weights did already."""
    right = Updater.compute_gradient

    def compute(self: Any, batch: Any) -> Any:
        self.model.set_gradient_divide_factor(float(self._processes.data_count))
        return right(self, batch)

    return mock.patch.object(Updater, "compute_gradient", compute)


def _same_rows() -> Any:
    """Every process has the rows of the first."""
    return mock.patch.object(Processes, "data_rank", 0)


def _averaged_over_spans() -> Any:
    """Gradients are divided by the number of processes that share rows: each span's is a part of the sum, no mean."""
    right = Updater.compute_gradient

    def compute(self: Any, batch: Any) -> Any:
        self.model.set_gradient_divide_factor(float(self._processes.mesh.context))
        return right(self, batch)

    return mock.patch.object(Updater, "compute_gradient", compute)


def _counted_once_a_process() -> Any:
    """The loss is added up over all processes, those that share rows too."""
    right = Processes.add_up
    return mock.patch.object(Processes, "add_up", lambda self, tensor: right(self, tensor) * self.mesh.context)


def _same_span() -> Any:
    """Every process computes the first span."""
    return mock.patch.object(ContextPlan, "of_rank", lambda self, rank: [slice(*self.edges[:2])])


MUTANTS: Mapping[str | None, Callable[[], Any]] = {
    None: contextlib.nullcontext,
    "local means": _local_means,
    "averaged twice": _averaged,
    "same rows": _same_rows,
    "averaged over spans": _averaged_over_spans,
    "counted once a process": _counted_once_a_process,
    "same span": _same_span,
}


def run(config: TrainingConfig) -> tuple[int, str]:
    """A whole run; its last step and why it stopped."""
    result = train(config, progress=False)
    return result.step, result.stopped_by


def run_changed(config: TrainingConfig, changes: Mapping[int, Mapping[str, Any]]) -> tuple[int, str]:
    """As `run`, with changed options on some ranks."""
    return run(dataclasses.replace(config, **changes.get(int(os.environ["RANK"]), {})))


PLACES: Mapping[str, tuple[Any, str]] = {
    **{name: (disk, name) for name in ("write", "sync", "rename", "append")},
    "copied": (Checkpoint, "copied"),
    "compute_gradient": (Updater, "compute_gradient"),
    "exchange": (ContextGroup, "exchange"),
}
"""What a process may be about to do when it dies."""


def run_killed(config: TrainingConfig, rank: int, place: str, number: int, death: Path) -> tuple[int, str]:
    """As `run`; one rank is killed just before its call number `number` of what `PLACES` says."""
    with _before(rank, *PLACES[place], number, lambda: die(death)):
        return run(config)


def run_killed_by_the_clock(config: TrainingConfig, rank: int, seconds: float, death: Path) -> tuple[int, str]:
    """As `run`; one rank is killed so many seconds after its third step began, whatever it does then."""

    def begin() -> None:
        timer = threading.Timer(seconds, die, (death,))
        timer.daemon = True
        timer.start()

    with _before(rank, Updater, "compute_gradient", 3, begin):
        return run(config)


def run_frozen(config: TrainingConfig, rank: int, seconds: float, death: Path) -> tuple[int, str]:
    """As `run`; one rank stops for ever at its third step, and is killed after so many seconds."""
    with _before(rank, Updater, "compute_gradient", 3, lambda: freeze(death, seconds)):
        return run(config)


@contextlib.contextmanager
def _before(rank: int, owner: Any, name: str, number: int, happens: Callable[[], None]) -> Iterator[None]:
    right, calls = getattr(owner, name), 0

    def changed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and int(os.environ["RANK"]) == rank:
            happens()
        return right(*arguments)

    with mock.patch.object(owner, name, changed):
        yield


def commands(cases: list[tuple[int, Callable[[], Any], Mapping[int, list[str]], list[str]]]) -> list[tuple[int, str]]:
    """Command lines one after the other, with some of their words changed on some ranks.

    Args:
        cases: port, a change of the world, arguments added on a rank, arguments of all.
    """
    found = []
    for port, change, added, arguments in cases:
        with change():
            found.append(command([*arguments, *added.get(int(os.environ["RANK"]), [])], port))
    return found


def _on_rank(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


def full_disk() -> Any:
    """The disk of rank 1 is full from the second checkpoint on."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model-00002-of-00002.safetensors")

    return _before(1, disk, "write", 3, fail)


def other_code() -> Any:
    """Rank 1 has other code."""
    digest = "of rank 1" if _on_rank(1) else "of the others"
    return mock.patch("polysketch.training.start.code_digest", return_value=digest)


def checkpoint_of(folder: Path, config: TrainingConfig) -> list[Any]:
    """What a run's last checkpoint gives to these processes: the whole tensors, from the first."""
    from polysketch.training.checkpoint import find_checkpoint, load_shared_checkpoint
    from polysketch.training.tensors import optimizer_tensors_to_load, tensors_to_load

    with joined(None, "cpu") as processes:
        model = build_model(make_plan(config, processes))
        _share_out(model, processes)
        found = load_shared_checkpoint(
            find_checkpoint(folder / "checkpoints"),
            model=tensors_to_load(model),
            optimizer=optimizer_tensors_to_load(model),
        )
        tensors = {name: whole(tensor).numpy() for name, tensor in {**found.model, **found.optimizer}.items()}
        with gathered(model):
            return [tensors] if processes.is_first else []


def unchanged() -> Any:
    """Nothing is changed."""
    return contextlib.nullcontext()


def run_stopped(config: TrainingConfig, step: int) -> tuple[int, str]:
    """As `run`; its time is up after so many steps, by the clock of the first process."""
    return _run_until(config, lambda loop: loop.step >= step)


def _run_until(config: TrainingConfig, is_over: Callable[[Any], bool]) -> tuple[int, str]:
    right = Processes.agreed_stop
    from polysketch.training import loop as module

    loops: list[Any] = []
    made = module.Loop.__init__

    def remembered(self: Any, *arguments: Any) -> None:
        loops.append(self)
        made(self, *arguments)

    def agreed(self: Processes, number: int | None, time_is_up: bool, failed: bool) -> tuple[int | None, bool, bool]:
        return right(self, number, is_over(loops[-1]) and self.is_first, failed)

    with mock.patch.object(module.Loop, "__init__", remembered), mock.patch.object(Processes, "agreed_stop", agreed):
        return run(config)


def run_signalled(config: TrainingConfig, rank: int, number: int) -> tuple[int, str]:
    """As `run`; one rank gets SIGTERM, twice, before it computes batch number `number`."""
    right, calls = Updater.compute_gradient, 0

    def compute(self: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and _on_rank(rank):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return right(self, batch)

    with mock.patch.object(Updater, "compute_gradient", compute):
        return run(config)
