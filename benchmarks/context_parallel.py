"""One sequence over several processes of this machine: a training step, its memory, and whether it is the same step.

    python -m benchmarks.context_parallel                        1,048,576 tokens over 4 processes; about half an hour
    python -m benchmarks.context_parallel --length 131072        the same at another length
    python -m benchmarks.context_parallel --ranks 2 --tiles 2 --length 2048 --same 1024 --out /tmp/some.json

Steps, each in fresh processes of one thread: `--same` tokens in whole rows by one process, by one process in tiles, and
over the ranks, whose losses and gradient norms must agree; a rank's share of `--length` tokens by one process; and all
of them over the ranks. Every process should need the memory that one process needs for its share. Freed memory goes
back to the system at once (MALLOC_MMAP_THRESHOLD_), so that peaks are of what is used. Writes
benchmarks/results/context-TIME.json, and goes on with a record that `--out` names: its cases are not measured again.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import RESULTS
from benchmarks.journal import stamped
from polysketch.benchmarking.environment import commit, environment, load
from polysketch.benchmarking.tables import print_table
from polysketch.benchmarking.workbench import save
from polysketch.distributed import ContextGroup
from polysketch.models import TransformerLM, preset

_SEED = 0
_LEARNING_RATE = 1e-3
_MEGABYTE = 2**20
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536"}
"""Read by the C library of Linux when a process starts."""


@dataclass(frozen=True)
class Case:
    """A training step to measure.

    Attributes:
        name: what it is.
        length: tokens of the row.
        ranks: processes.
        tiles: of the row, over all processes; 0 for whole rows as one process computes them.
        preset: of the model.
    """

    name: str
    length: int
    ranks: int
    tiles: int
    preset: str


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 1 where losses, gradients or memory are not as they should be."""
    arguments = _parse(argv)
    path = arguments.out or RESULTS / stamped("context", ".json")
    os.environ.update(_MALLOC)
    report: dict[str, Any] = {
        "benchmark": "context_parallel",
        "environment": environment(torch.device("cpu")),
        "load_before": load(),
        "cases": _measured_before(path, cases(arguments)),
    }
    for case in cases(arguments)[len(report["cases"]) :]:
        report["cases"].append({**asdict(case), "commit": commit(), "processes": run(case)})
        save({**report, "load_after": load()}, path)
        print_table([_line(report["cases"][-1])])
    report["findings"] = findings(report["cases"])
    save({**report, "load_after": load()}, path)
    print(f"{report['findings']}\nrecord: {path}")
    return int(not all(report["findings"].values()))


def _measured_before(path: Path, wanted: Sequence[Case]) -> list[dict[str, Any]]:
    """The first cases of a record, where there is one of these."""
    found = json.loads(path.read_text())["cases"] if path.exists() else []
    given = [{name: case[name] for name in asdict(wanted[0])} for case in found]
    if given != [asdict(case) for case in wanted[: len(found)]]:
        raise SystemExit(f"{path} is a record of other cases: name another file by --out")
    return found


def cases(arguments: argparse.Namespace) -> list[Case]:
    """What is measured."""
    ranks, tiles, same, length = arguments.ranks, arguments.tiles, arguments.same, arguments.length
    given = {"preset": arguments.preset}
    return [
        Case("whole rows", same, 1, 0, **given),
        Case("tiles, one process", same, 1, tiles, **given),
        Case("tiles, all ranks", same, ranks, tiles, **given),
        Case("a rank's share", length // ranks, 1, tiles // ranks, **given),
        Case("all tokens", length, ranks, tiles, **given),
    ]


def findings(measured: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether the steps of one length agree, and whether a process needs the memory of its share, within 10 %."""
    by_name = {case["name"]: case["processes"] for case in measured}
    whole, one, several = (by_name[name] for name in ("whole rows", "tiles, one process", "tiles, all ranks"))
    share, every = by_name["a rank's share"][0]["peak_bytes"], by_name["all tokens"]
    figures = ("loss", "gradient_norm")
    return {
        "loss and gradient norm of whole rows to 1e-5": all(
            abs(rank[name] / whole[0][name] - 1) < 1e-5 for rank in several for name in figures
        ),
        "bits of one process": all(rank[name] == one[0][name] for rank in several for name in figures),
        "memory of a rank's share within 10 %": all(rank["peak_bytes"] < 1.1 * share for rank in every),
    }


def run(case: Case) -> list[dict[str, Any]]:
    """What each process found."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_work, (case, folder), nprocs=case.ranks, start_method="spawn")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.ranks)]


def _work(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    if case.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=case.ranks)
    group = dist.group.WORLD if case.ranks > 1 else None
    found = step(case, ContextGroup(group, tiles=case.tiles) if case.tiles else None)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def step(case: Case, context: ContextGroup | None) -> dict[str, Any]:
    """One training step; its figures."""
    torch.manual_seed(_SEED)
    model = TransformerLM(preset(case.preset, attention="polysketch"))
    model.activation_checkpointing = True
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    ids = torch.randint(0, model.config.vocab_size, (1, case.length + 1))
    started, own = time.perf_counter(), time.process_time()
    loss = model.loss(ids, context=context)
    loss.backward()
    if context is not None:
        context.sum_gradients(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {
        "loss": float(loss.detach()),
        "gradient_norm": float(norm),
        "seconds": time.perf_counter() - started,
        "process_seconds": time.process_time() - own,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "messages": 0 if context is None else context.traffic.messages,
        "message_bytes": 0 if context is None else context.traffic.bytes,
    }


def _line(case: dict[str, Any]) -> dict[str, str]:
    processes = case["processes"]
    return {
        "case": case["name"],
        "tokens": f"{case['length']:,}",
        "processes": str(case["ranks"]),
        "tiles": str(case["tiles"]),
        "loss": f"{processes[0]['loss']:.6f}",
        "gradient norm": f"{processes[0]['gradient_norm']:.6f}",
        "seconds": f"{max(each['seconds'] for each in processes):.1f}",
        "peak MB": " ".join(f"{each['peak_bytes'] / _MEGABYTE:.0f}" for each in processes),
        "sent MB": f"{sum(each['message_bytes'] for each in processes) / _MEGABYTE:.2f}",
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=2**20, help="tokens of the long row")
    parser.add_argument("--same", type=int, default=2**17, help="tokens of the row that one process computes too")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--tiles", type=int, default=128, help="tiles of a row, a multiple of the processes")
    parser.add_argument("--preset", default="tiny", help="of the model")
    parser.add_argument("--out", type=Path, help="where to write the record")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
