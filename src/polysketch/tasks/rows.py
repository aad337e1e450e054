"""The rows of a task that a model is trained on, in an order that needs no state."""

from __future__ import annotations

import hashlib

import numpy as np

from polysketch.data.permutation import KeyedPermutation
from polysketch.tasks.base import Task
from polysketch.tasks.batch import TaskBatch


class TaskRows:
    """Training rows as a pure function of (seed, number of the step).

    Where there is no end of rows, each is seen once. Else a keyed permutation gives their order in each epoch.

    Args:
        task: the task.
        seed: another one gives another order.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed
        self.num_rows = task.num_rows("train")

    def batch(self, step: int, batch_size: int) -> TaskBatch:
        """The rows that a step trains on.

        Args:
            step: number of the step, from 0.
            batch_size: rows.
        """
        indices = step * batch_size + np.arange(batch_size)
        if self.num_rows is not None:
            indices = shuffled(indices, self.num_rows, self._seed)
        return self._task.rows("train", indices)


def shuffled(indices: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """The rows that come at places of an endless sequence of epochs, each of which has all rows in an order of its own.

    Args:
        indices: places, from 0.
        num_rows: of an epoch.
        seed: another one gives other orders.

    Returns:
        Numbers of rows, from 0.
    """
    epochs, places = np.divmod(indices, num_rows)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        digest = hashlib.blake2b(f"rows/{seed}/{epoch}".encode(), digest_size=8).digest()
        places[chosen] = KeyedPermutation(num_rows, int.from_bytes(digest, "little"))(places[chosen])
    return places
