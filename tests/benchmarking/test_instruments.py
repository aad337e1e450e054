"""Clocks, ratios, floors and the memory probe measure right."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polysketch.benchmarking import environment, floors, memory
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.timing import Clock, Rates, Timing, matrix_rate, ratio
from polysketch.benchmarking.way_names import Sizes

PROBE = """
import torch
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.memory import attention_bytes

def make(shape, device, dtype):
    value = torch.ones(shape.batch, shape.heads, shape.length, shape.head_dim)
    def run():
        scratch = torch.ones(shape.length * 1024)
        return value * scratch.sum()
    return Call(run, [value])

from polysketch.benchmarking.floors import Shape
print(attention_bytes(make, Shape(1, 32768, 2), backward=False))
"""


def test_the_memory_probe_finds_scratch_memory_and_not_the_output():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    scratch = 32_768 * 1_024 * 4
    assert 0.95 * scratch < int(done.stdout) < 1.1 * scratch


def test_alternating_calls_take_turns_and_ratios_compare_neighbours():
    order = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = Clock(torch.device("cpu")).alternate(functions, repeats=2)
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    assert ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == 2.0


def test_a_floor_is_the_longer_of_arithmetic_and_memory():
    assert Floor(100, 10).seconds(Rates(10, 10)) == 10
    assert Floor(10, 100).seconds(Rates(10, 10)) == 10


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)], ids=str)
def test_rates_are_above_zero(rates):
    with pytest.raises(ValueError, match="expected a rate above zero"):
        Rates(*rates)


def test_a_slow_dtype_is_measured_by_smaller_products():
    """Of a machine without its instructions, a product of the size asked for would take minutes."""

    class Slow(Clock):
        def measure(self, function, **_) -> Timing:
            function()
            measured.append(1)
            return Timing(*[0.1 * 8 ** (len(measured) - 1)] * 3, 1)

    measured: list[int] = []
    assert matrix_rate(Slow(torch.device("cpu")), torch.float32, 2048) == 2 * 512**3 / 0.8
    assert len(measured) == 2


def test_doubling_the_length_doubles_the_linear_floor_and_quadruples_the_exact_one():
    short, long = Shape(1, 2**14), Shape(1, 2**15)
    exact = [floors.exact_attention(shape, backward=False, itemsize=2).operations for shape in (short, long)]
    linear = [floors.polysketch(shape, 32, 256, backward=True, itemsize=2).operations for shape in (short, long)]
    assert exact[1] / exact[0] == pytest.approx(4)
    assert linear[1] / linear[0] == pytest.approx(2, rel=0.02)


def test_within_one_chunk_linear_attention_has_the_floor_of_exact_attention():
    for shape in (Shape(2, 256), Shape(2, 256, causal=False)):
        linear = floors.linear_attention(shape, 32, 256, backward=False, itemsize=4)
        assert linear.operations == floors.exact_attention(shape, backward=False, itemsize=4).operations


def test_tokens_that_see_all_others_cost_exact_attention_twice_and_sums_the_same():
    options = {"backward": False, "itemsize": 4}
    causal, both = (Shape(1, 2**14, causal=causal) for causal in (True, False))
    exact = [floors.exact_attention(shape, **options).operations for shape in (causal, both)]
    linear = [floors.linear_attention(shape, 32, 256, **options).operations for shape in (causal, both)]
    assert exact[1] == 2 * exact[0]
    chunks = 2 * 2 * both.rows * 128 * 64
    assert linear[1] - linear[0] == pytest.approx(chunks + 2 * 2 * 256 * 12 * 528 * 65)


def test_a_random_sketch_costs_less_than_a_learned_one_and_more_than_none():
    shape, options = Shape(1, 4_096), {"backward": False, "itemsize": 4}
    learned, random = (floors.polysketch(shape, 32, 256, **options, learned=learned) for learned in (True, False))
    given = floors.linear_attention(shape, 32, 256, **options)
    per_row = 2 * 2 * (16 * 64 * 32 + 48 * 32**2)
    assert learned.operations - given.operations == per_row * shape.rows
    assert random.operations - given.operations == 2 * 2 * 2 * 64 * 32 * shape.rows


@pytest.mark.full
def test_a_process_that_fails_is_reported_with_its_last_line(bench):
    with pytest.raises(RuntimeError, match=r"memory of nonsense failed: .*unknown way to attend 'nonsense'"):
        memory.attention(bench, "nonsense", [Shape(1, 8)], Sizes(), backward=False)


def test_the_commit_is_that_of_the_package_and_not_of_a_repository_around_it(tmp_path, monkeypatch):
    """An installed package lies in an environment that may lie in somebody else's repository."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    package = tmp_path / "site-packages" / "polysketch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(environment, "_PACKAGE", package)
    assert environment.commit() == "unknown"


def test_the_digest_of_the_source_sees_every_change(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path)
    digests = set()
    for name, text in [("a.py", "1"), ("a.py", "2"), ("kernel.cpp", "1"), ("kernel.cpp", "2")]:
        Path(tmp_path, name).write_text(text)
        digests.add(environment.source_digest())
    assert len(digests) == 4
