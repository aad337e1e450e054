"""Where memory is not enough, one line says what was asked for, what is free, and what to change."""

import re

import pytest
import torch

from polysketch import cli
from polysketch.cli.memory_message import memory_message
from polysketch.training import memory

OF_CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 5.50 GiB is "
    "free. Including non-PyTorch memory, this process has 73.60 GiB memory in use."
)


@pytest.fixture
def free(monkeypatch):
    """Three gigabytes are free."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3_000_000_000)


def test_what_pytorch_says_on_this_machine_is_understood(free):
    """Its own words, of its own allocator."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    line = memory_message(caught.value)
    assert line == (
        f"not enough memory: {2**60 / 1e9:,.1f} GB were asked for, 3.0 GB are free: choose a smaller batch, context or "
        "model, or fewer heads"
    )
    assert cli._describe(caught.value) == line


def test_of_a_gpu_too():
    line = memory_message(torch.OutOfMemoryError(OF_CUDA))
    assert line is not None
    assert line.startswith("not enough memory: 20.00 GiB were asked for, 5.50 GiB of the GPU are free: ")


def test_an_error_of_python_says_what_is_free(free):
    assert memory_message(MemoryError()).startswith("not enough memory, 3.0 GB are free: choose ")


def test_nothing_is_claimed_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    assert memory_message(MemoryError()).startswith("not enough memory: choose ")


@pytest.mark.parametrize("error", [ValueError("3 bytes"), RuntimeError("the run folder is in use"), OSError(12, "x")])
def test_other_errors_are_left_alone(error):
    assert memory_message(error) is None


@pytest.mark.full
def test_the_command_says_it(capfd, monkeypatch):
    """Ten million rows of 99 tokens: one line, status 1."""
    status = cli.main(["benchmark", "attention", "--lengths", "100000000", "--heads", "64", "--repeats", "1"])
    assert status == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(r"polysketch: not enough memory: [\d,.]+ GB were asked for, [\d,.]+ GB are free: .*", last)
