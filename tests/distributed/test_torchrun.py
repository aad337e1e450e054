"""Under torchrun itself: all are started again after one was killed, and end bit for bit as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.test_runs import arguments, assert_same_tensors, metrics, tensors

pytestmark = pytest.mark.full


def torchrun(options: list[str], script: list[str], words: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, *script, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def test_torchrun_starts_all_again_after_a_kill(make_config, tmp_path):
    config, alone = make_config(), make_config(out=tmp_path / "alone")
    words = [*arguments(config, steps=3), "--resume"]
    killed = torchrun(["--max-restarts", "1"], [str(Path(__file__).with_name("killed_once.py"))], words)
    assert killed.returncode == 0, killed.stderr
    assert "going on after step 0" in killed.stderr
    assert killed.stderr.count("polysketch: ") == killed.stderr.count("polysketch: rank 1 (process ") == 1
    whole = torchrun([], ["-m", "polysketch"], arguments(alone, steps=3))
    assert whole.returncode == 0, whole.stderr
    assert metrics(config.out) == metrics(alone.out)
    assert_same_tensors(tensors(config.out), tensors(alone.out))
