"""Several processes learn a task as one does: encoders, two towers, a row out of one vector, hidden tokens."""

import pytest

from distributed import workers
from distributed.launching import run_processes
from distributed.test_gradients import losses
from polysketch.tasks import Classification, ClassifiedRows, write_task
from polysketch.tasks.mad import Compression
from polysketch.tasks.reversal import Reversal
from polysketch.training import TrainingConfig, train


def pairs() -> Classification:
    """Rows of unequal length, as the documents in them."""
    rows = [Reversal(length=14, shortest=2).row("train", index).ids for index in range(80)]
    split = ClassifiedRows.of(rows, [int(rows[number][0] < rows[number + 1][0]) for number in range(0, 80, 2)])
    return Classification({"train": split, "validation": split}, 11, ["no", "yes"], documents=2)


TASKS = {"pair": pairs, "recovered": lambda: Compression(length=9), "written": lambda: Reversal(asks="written")}
CASES = [("pair", "auto"), ("pair", "masked"), ("written", "auto"), ("recovered", "auto"), ("text", "masked")]


@pytest.mark.full  # test_gradients.py trains a language model
@pytest.mark.parametrize(("what", "objective"), CASES)
def test_a_run_has_the_losses_of_one_process(what: str, objective: str, make_config, tmp_path):
    """Training and validation, in float32."""
    given = {"attention": None, "attention_options": {}, "objective": objective, "activation_checkpointing": True}
    if what != "text":
        write_task(TASKS[what](), tmp_path / "task")
        given |= {"data": tmp_path / "task", "context": TrainingConfig.context}
    alone = make_config(out=tmp_path / "alone", **given)
    many = make_config(out=tmp_path / "many", mesh="shard=2", **given)
    train(alone, progress=False)
    ended = run_processes(2, workers.run, many, folder=tmp_path / "told")
    assert [each.value for each in ended] == [(6, "finished")] * 2
    assert abs(losses(many.out) / losses(alone.out) - 1).max() < 1e-5
    assert len(losses(many.out)) == 8
