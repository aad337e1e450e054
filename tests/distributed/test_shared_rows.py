"""Runs whose rows are shared by several processes: gradients and figures of one, what travels, and what is refused."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distributed import workers
from distributed.launching import free_port, run_processes
from distributed.test_gradients import count_of, full, largest_error, losses
from distributed.test_runs import (
    arguments,
    assert_goes_on_to_the_same_end,
    assert_others_end_and_name,
    metrics,
    run_left_alone,
)
from polysketch.data import PreparedData
from polysketch.distributed.mesh import Mesh
from polysketch.distributed.processes import Processes
from polysketch.training import start, step, train
from polysketch.training.diagnostics import measure
from polysketch.training.trainer import build_model

MESHES = ["replicate=2,context=2", "shard=2,context=2", "context=4", "context=2"]
"""The first always: copies of a model whose shares are those of neighbours with a row in common."""
DEFAULT = {"attention": "polysketch", "attention_options": {"window": 7, "sketch_size": 4, "far_bias": 0.0}}
"""A state by the delta rule behind a convolution; the fixture's mechanism has decayed sums behind open chunks."""


WINDOWS = {"pack": "windows", "context": 50}
DOCUMENTS = {"pack": "documents", "context": 131, "batch_size": 4}


@pytest.fixture(
    params=[(WINDOWS, DOCUMENTS), pytest.param((DOCUMENTS, WINDOWS), marks=pytest.mark.full)],
    ids=["windows whole", "documents whole"],
)
def configs(request, make_config):
    """Windows and packed documents, spans of unequal lengths: one by the default in whole batches, the other by the
    fixture's mechanism in two parts, with activation checkpointing, each span as several tiles."""
    whole, in_parts = request.param
    return [
        make_config(clip=1e9, **whole, **DEFAULT),
        make_config(clip=0.1, accumulation=2, activation_checkpointing=True, **in_parts),
    ]


@pytest.fixture
def expected(configs):
    """Of one process."""
    return [workers.gradient_of(config, Processes()) for config in configs]


@pytest.mark.parametrize("mesh", [MESHES[0], *full(MESHES[1:])])
def test_the_gradient_is_that_of_one_process(mesh, configs, expected, tmp_path):
    """In float64, with its loss and its norm before clipping."""
    first, *_ = run_processes(count_of(mesh), workers.gradients, mesh, configs, None, folder=tmp_path / "told")
    errors = [largest_error(*pair) for pair in zip(first.value, expected, strict=True)]
    assert all(error < 1e-10 for error in errors)  # not the largest: a comparison with NaN is never true


@pytest.mark.full
@pytest.mark.parametrize("mutant", ["averaged over spans", "counted once a process", "same span"])
def test_the_comparison_notices(mutant, configs, tmp_path):
    first, *_ = run_processes(2, workers.gradients, "context=2", configs[:1], mutant, folder=tmp_path / "told")
    assert largest_error(first.value[0], workers.gradient_of(configs[0], Processes())) > 1e-4


LONG = {"context": 150}
"""Rows of which an edge between two spans cuts a document, where each group has one of them."""


@pytest.mark.full  # the first test compares gradients
@pytest.mark.parametrize(("mesh", "rows"), [("context=2", 1), ("replicate=2,context=2", 2)])
def test_a_run_has_the_losses_of_one_process(mesh, rows, make_config, tmp_path):
    """Training and validation, in float32: rounding of the sums alone. No validation token is counted twice."""
    options = {**LONG, "batch_size": rows}
    alone, many = make_config(out=tmp_path / "alone", **options), make_config(mesh=mesh, **options)
    train(alone, progress=False)
    ended = run_processes(count_of(mesh), workers.run, many, folder=tmp_path / "told")
    assert [each.value for each in ended] == [(6, "finished")] * count_of(mesh)
    assert np.abs(losses(many.out) / losses(alone.out) - 1).max() < 1e-5
    counted = [[line["tokens"] for line in metrics(config.out)] for config in (alone, many)]
    assert counted[0] == counted[1]
    assert len(losses(many.out)) == 8


@pytest.mark.full
@pytest.mark.parametrize(("rank", "place", "number"), [(1, "write", 3), (0, "exchange", 7), (1, "exchange", 8)])
def test_killed_and_started_again_it_ends_the_same(rank, place, number, make_config, tmp_path):
    """While it writes a checkpoint; before it sends a state, or the gradient of one, that the other waits for."""
    options, death = {"mesh": "context=2", **LONG, "batch_size": 1}, tmp_path / "death"
    config = make_config(**options)
    left_alone = run_left_alone(2, make_config(out=tmp_path / "alone", **options), tmp_path)
    ended = run_processes(2, workers.run_killed, config, rank, place, number, death, folder=tmp_path / "killed")
    assert_others_end_and_name(rank, ended, death)
    assert_goes_on_to_the_same_end(2, config, left_alone, tmp_path)


@pytest.mark.full
def test_another_mesh_goes_on(make_config, tmp_path):
    """Begun with shared rows, gone on with by one process."""
    options = {**LONG, "batch_size": 1}
    shared = make_config(mesh="context=2", max_minutes=1e-9, **options)
    whole = make_config(out=tmp_path / "whole", **options)
    run_processes(2, workers.run_stopped, shared, 4, folder=tmp_path / "two")
    train(dataclasses.replace(shared, mesh=None, max_minutes=None, resume=True), progress=False)
    train(whole, progress=False)
    assert np.abs(losses(shared.out) / losses(whole.out) - 1).max() < 1e-5


def test_the_use_of_the_prefix_is_measured_on_as_many_tokens_as_a_process_holds(make_config):
    """The loss is that of whole rows."""
    config, two = make_config(), Processes(mesh=Mesh(context=2))
    model, data = build_model(start.make_plan(config)), PreparedData.open(config.data)
    given = {"batch_size": 2, "max_tokens": 200}
    shared, whole = (measure(model, data, context=96, processes=each, **given) for each in (two, None))
    assert shared["prefix_shares"] == measure(model, data, context=48, **given)["prefix_shares"]
    assert shared["loss"] == whole["loss"]
    assert shared["prefix_shares"] != whole["prefix_shares"]


@pytest.mark.parametrize(
    ("shape", "again", "expected"),
    [
        ((1, 131_072), False, 1),
        ((1, 131_073), True, 4),
        ((1, 131_072), True, 2),
        ((9000, 9), True, 2),
        ((9, 90_000), True, 16),
    ],
)
def test_long_spans_are_computed_in_tiles_where_that_takes_less_memory(shape, again, expected):
    """Of at most 16,384 tokens of all rows, on each of 4 processes; no tile is empty."""
    model = SimpleNamespace(activation_checkpointing=again)
    assert step._smaller_tiles(model, torch.empty(shape, device="meta"), 4) == expected


KINDS = {"polysketch": DEFAULT, "polysketch-paper": {"attention_options": {"sketch_size": 8, "local_chunk": 8}}}
"""A state that goes from process to process, and sums that are gathered behind tokens of a neighbour."""


@pytest.mark.full  # test_context.py counts what a layer sends
@pytest.mark.parametrize("kind", ["polysketch", *full(["polysketch-paper"])])
def test_what_travels_depends_on_neither_length_nor_parts(kind, make_config, tmp_path):
    """Parameters are gathered and gradients summed once a step, in however many parts it is computed."""
    sizes = [(48, 1), (96, 1), (48, 4)]
    options = {"pack": "windows", **KINDS[kind]}
    configs = [make_config(context=context, accumulation=parts, **options) for context, parts in sizes]
    ended = run_processes(2, workers.traffic, "context=2", configs, folder=tmp_path / "told")
    layers, sums = configs[0].layers, 2 if kind == "polysketch-paper" else 0
    for each in ended:
        (short, of_short), (long, of_long), (parted, of_parted) = each.value
        assert (short, of_short) == (long, of_long)
        for found, parts in ((short, 1), (parted, 4)):
            assert found.pop("_allgather_base_") == found.pop("_reduce_scatter_base_") == 1
            # Of each part the digest of its rows, its loss, and what adds up with its gradient.
            assert found.pop("allgather_") == parts * (2 + sums * layers)
            # A state or last tokens one way, their gradient the other.
            assert found.pop("send") == found.pop("recv_") == parts * layers
            assert found == {"allreduce_": 2}  # of the norm and the loss
        assert of_short == of_parted  # rows of a step, whose states and sums these are


@pytest.mark.full
def test_what_does_not_fit_is_told_in_one_line(make_config, tmp_path):
    config = make_config()
    shared = {"mesh": "context=2"}
    cases = {
        "product of 2, the number of processes, found 4": {"mesh": "shard=2,context=2"},
        "--mesh replicate=1,shard=1,context=2: layer 0: SoftmaxAttention has no state of constant size": {
            **shared,
            "attention": "softmax",
        },
        "expected a --context of at least 2, a token for each process that shares a row, found 1": {
            **shared,
            "context": 1,
        },
    }
    given = [(free_port(), workers.unchanged, {}, arguments(config, **changes)) for changes in cases.values()]
    compiled = [*arguments(config, pack="windows", **shared), "--compile"]
    carried = [*arguments(config, **shared), "--carry-state"]
    given += [(free_port(), workers.unchanged, {}, words) for words in (compiled, carried)]
    first, second = run_processes(2, workers.commands, given, folder=tmp_path / "told")
    expectations = [*cases, "--compile: expected one process", "--carry-state: expected whole rows on every process"]
    for expected, (status, told), (_, other) in zip(expectations, first.value, second.value, strict=True):
        assert status == 1, told
        assert re.search(expected, told), told
        assert told.startswith("polysketch: ")
        assert told.count("\n") == 1
        assert other == ""
    assert not (config.out / "config.json").exists()


def test_a_batch_that_the_groups_do_not_divide_is_refused(make_config):
    with pytest.raises(ValueError, match=r"--batch-size: expected a multiple of 4, .* 2 groups of 2 processes have"):
        start._check_shared(make_config(batch_size=6, accumulation=2), Mesh(shard=2, context=2))
