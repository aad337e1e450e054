"""A process that runs tasks by their numbers: `python -m benchmarks.checks.worker DEVICE [quick]`.

Reads a number a line and answers with a line of JSON, the task's records. It ends after a task that left the device
unusable, as an access out of bounds does: whoever asks starts another.
"""

import json
import sys
import warnings
from typing import Any

import torch

from benchmarks.checks.tasks import all_tasks
from polysketch.benchmarking.timing import matmul_precision

MARK = "records: "  # libraries print to the same stream


def main() -> None:
    """Answer until there is no more line."""
    device, quick = torch.device(sys.argv[1]), "quick" in sys.argv[2:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tasks = all_tasks(quick=quick)
    with matmul_precision("highest"):
        for line in sys.stdin:
            records = tasks[int(line)].run(device)
            print(MARK + json.dumps(records), flush=True)
            if not _usable(device):
                sys.exit(3)


def _usable(device: torch.device) -> bool:
    """Whether the device still computes: after an illegal access every call fails."""
    try:
        answer: Any = torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return answer == 2


if __name__ == "__main__":
    main()
