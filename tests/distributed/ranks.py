"""Functions on several processes of this machine, by gloo."""

import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def run_on_ranks(count: int, function: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What a function of a module, which asks `torch.distributed` for its rank, returns on each rank, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        # PyTorch is loaded once, by the process from which the ranks are forked.
        multiprocessing.set_forkserver_preload([function.__module__])
        arguments = (count, function, folder)
        torch.multiprocessing.start_processes(_work, arguments, nprocs=count, start_method="forkserver")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def _work(rank: int, count: int, function: Callable[[], dict[str, Any]], folder: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(function()))
        dist.barrier()
    finally:
        dist.destroy_process_group()
