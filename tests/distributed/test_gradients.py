"""Several processes compute the gradient and the losses of one."""

import json

import numpy as np
import pytest

from distributed import workers
from distributed.launching import run_processes
from polysketch.distributed.processes import Processes
from polysketch.training import train

MESHES = ["shard=2", "replicate=2,shard=2", "replicate=2", "shard=4", "replicate=4"]
"""The first always: test_shared_rows.py has copies of shares too."""


def full(values: list[str]) -> list:
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def count_of(mesh: str) -> int:
    return int(np.prod([int(part.partition("=")[2]) for part in mesh.split(",")]))


@pytest.fixture(
    params=[("windows", "documents"), pytest.param(("documents", "windows"), marks=pytest.mark.full)],
    ids=["windows whole", "documents whole"],
)
def configs(request, make_config):
    """Windows and packed documents: one in whole batches with a small gradient, one in two parts with a clipped one."""
    whole, in_parts = request.param
    return [
        make_config(pack=whole, clip=1e9),
        make_config(pack=in_parts, accumulation=2, clip=0.1, activation_checkpointing=True),
    ]


@pytest.fixture
def expected(configs):
    """Of one process."""
    return [workers.gradient_of(config, Processes()) for config in configs]


def largest_error(found, expected) -> float:
    """Relative to the largest entry of each parameter's gradient."""
    assert found.keys() == expected.keys()
    errors = [np.abs(found[name] - want.numpy()).max() / want.abs().max().item() for name, want in expected.items()]
    return float(np.max(errors))  # NaN where there is one


@pytest.mark.parametrize("mesh", [MESHES[0], *full(MESHES[1:])])
def test_the_gradient_is_that_of_one_process(mesh, configs, expected, tmp_path):
    """In float64, with its loss and its norm before clipping."""
    first, *_ = run_processes(count_of(mesh), workers.gradients, mesh, configs, None, folder=tmp_path / "told")
    errors = [largest_error(*pair) for pair in zip(first.value, expected, strict=True)]
    assert all(error < 1e-10 for error in errors)  # not the largest: a comparison with NaN is never true


@pytest.mark.full
@pytest.mark.parametrize("mutant", ["local means", "averaged twice", "same rows"])
def test_the_comparison_notices(mutant, configs, expected, tmp_path):
    first, *_ = run_processes(2, workers.gradients, "shard=2", configs[1:], mutant, folder=tmp_path / "told")
    assert largest_error(first.value[0], expected[1]) > 1e-4


def losses(folder) -> np.ndarray:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines])


@pytest.mark.full  # test_runs.py compares a run of two, gone on with by one
@pytest.mark.parametrize("mesh", ["shard=2", *full(["replicate=2,shard=2"])])
def test_a_run_has_the_losses_of_one_process(mesh, make_config, tmp_path):
    """Training and validation, in float32: rounding of the sums alone, a few units in the last of 24 bits a step."""
    alone, many = make_config(out=tmp_path / "alone"), make_config(out=tmp_path / "many", mesh=mesh)
    train(alone, progress=False)
    ended = run_processes(count_of(mesh), workers.run, many, folder=tmp_path / "told")
    assert [each.value for each in ended] == [(6, "finished")] * count_of(mesh)
    assert np.abs(losses(many.out) / losses(alone.out) - 1).max() < 1e-5
    assert len(losses(many.out)) == 8
