"""States of many requests as rows of one state: a request takes a slot, and leaves it."""

import torch

from polysketch.generation.state_tensors import copy_rows_, mapped, shape_of
from polysketch.models import ModelState, TransformerLM

__all__ = ["Slots", "bytes_of_request", "state_of_one"]


class Slots:
    """Room for the states of so many requests, allocated once.

    Slots in use are always the first ones, so that a step computes them and no others: where a request leaves, the
    last one moves into its slot. Putting a state in and moving one copy one row; the others stay where they are.

    Args:
        model: whose states these are.
        count: requests at most, at least 1.

    Raises:
        ValueError: a count below 1, or a layer whose state grows.
    """

    def __init__(self, model: TransformerLM, count: int) -> None:
        if count < 1:
            raise ValueError(f"expected at least 1 slot, found {count}")
        self.count = count
        self._all: ModelState = mapped(state_of_one(model), lambda row: row.new_zeros(count, *row.shape[1:]))
        self._used: ModelState = self._first(0)

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._used.position)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not."""
        return self._all.nbytes

    @property
    def state(self) -> ModelState:
        """The state of the slots in use, to be moved on in place by `extend`."""
        return self._used

    def put(self, row: ModelState) -> int:
        """Copy a state of one row into the next slot, and return its number.

        Raises:
            ValueError: all slots are in use.
        """
        slot = len(self)
        if slot == self.count:
            raise ValueError(f"all {self.count} slots are in use")
        self._settle()
        copy_rows_(self._all, slice(slot, slot + 1), row)
        self._used = self._first(slot + 1)
        return slot

    def copy(self, slot: int) -> ModelState:
        """The state in a slot, as one row of its own."""
        return mapped(self._used, lambda tensor: tensor[slot : slot + 1].clone())

    def free(self, slot: int) -> None:
        """Give up a slot; the last one in use moves into it."""
        last = len(self) - 1
        self._settle()
        if slot != last:
            moved = mapped(self._all, lambda tensor: tensor[last : last + 1])
            copy_rows_(self._all, slice(slot, slot + 1), moved)
        self._used = self._first(last)

    def clear(self) -> None:
        """Give up all slots, whatever is in them."""
        self._used = self._first(0)

    def _first(self, count: int) -> ModelState:
        return mapped(self._all, lambda tensor: tensor[:count])

    def _settle(self) -> None:
        """Take back what a step put beside the slots instead of into them: positions, for one."""
        copy_rows_(self._all, slice(len(self)), self._used)


def bytes_of_request(model: TransformerLM) -> int:
    """Bytes of the state of one request, the same at every position.

    Raises:
        ValueError: a layer whose state grows.
    """
    return state_of_one(model).nbytes


@torch.inference_mode()
def state_of_one(model: TransformerLM) -> ModelState:
    """The state of one row after a token: all its tensors are there.

    Raises:
        ValueError: a layer whose state grows.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.output_bias.device)
    _, state = model.extend_hidden(token, model.init_state(1))
    shapes = [shape_of(layer) for layer in state.layers]
    _, later = model.extend_hidden(token, state.clone())
    for index, (layer, (name, _)) in enumerate(zip(later.layers, model.config.layers(), strict=True)):
        if shape_of(layer) != shapes[index]:
            raise ValueError(
                f"expected layers whose state has a constant size, found {name} in layer {index}, whose state grows "
                "with the text: such models generate by polysketch generate, or are exported for other engines"
            )
    return state
