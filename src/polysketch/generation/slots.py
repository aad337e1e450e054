"""States of many requests as rows of one state: a request takes a slot, and leaves it."""

import torch

from polysketch.attention import KeyValueRows
from polysketch.generation.state_tensors import copy_rows_, growing_parts, mapped, shape_of
from polysketch.models import ModelState, TransformerLM

__all__ = ["Slots", "bytes_of_request", "reserve", "state_of_one"]


class Slots:
    """Room for the states of so many requests, allocated once.

    Slots in use are always the first ones, so that a step computes them and no others: where a request leaves, the
    last one moves into its slot. Putting a state in and moving one copy one row; the others stay where they are.

    Keys and values of all tokens, of layers that keep them, are no rows of one tensor: each request brings its own,
    which are not copied, and takes them away.

    Args:
        model: whose states these are.
        count: requests at most, at least 1.

    Raises:
        ValueError: a count below 1, or a layer whose state grows otherwise than by the keys and values of its tokens.

    Attributes:
        count: as given.
        fixed_bytes: of the state of a request, whatever its length.
        token_bytes: beside them, for each token; 0 where every layer has a state of constant size.
    """

    def __init__(self, model: TransformerLM, count: int) -> None:
        if count < 1:
            raise ValueError(f"expected at least 1 slot, found {count}")
        self.count = count
        one = state_of_one(model)
        self.token_bytes, self.fixed_bytes = _token_bytes(one), _fixed_bytes(one)
        self._all: ModelState = mapped(
            one, lambda row: row.new_zeros(count, *row.shape[1:]), growing=lambda _: KeyValueRows()
        )
        self._used: ModelState = self._first(0)

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._used.position)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not, and of the keys and values that requests have brought."""
        return self._all.nbytes

    @property
    def state(self) -> ModelState:
        """The state of the slots in use, to be moved on in place by `extend`."""
        return self._used

    def put(self, row: ModelState) -> int:
        """Copy a state of one row into the next slot, and return its number; keys and values are taken as they are.

        Raises:
            ValueError: all slots are in use.
        """
        slot = len(self)
        if slot == self.count:
            raise ValueError(f"all {self.count} slots are in use")
        self._settle()
        copy_rows_(self._all, slice(slot, slot + 1), row)
        brought = growing_parts(row)
        for path, rows in growing_parts(self._all).items():
            rows.rows.append(brought[path])
        self._used = self._first(slot + 1)
        return slot

    def copy(self, slot: int) -> ModelState:
        """The state in a slot, as one row of its own."""
        return mapped(
            self._used,
            lambda tensor: tensor[slot : slot + 1].clone(),
            growing=lambda rows: rows.rows[slot].clone(),
        )

    def free(self, slot: int) -> None:
        """Give up a slot; the last one in use moves into it."""
        last = len(self) - 1
        self._settle()
        if slot != last:
            moved = mapped(self._all, lambda tensor: tensor[last : last + 1])
            copy_rows_(self._all, slice(slot, slot + 1), moved)
        for rows in growing_parts(self._all).values():
            rows.rows[slot] = rows.rows[last]
            rows.rows.pop()
        self._used = self._first(last)

    def clear(self) -> None:
        """Give up all slots, whatever is in them."""
        for rows in growing_parts(self._all).values():
            rows.rows.clear()
        self._used = self._first(0)

    def _first(self, count: int) -> ModelState:
        return mapped(self._all, lambda tensor: tensor[:count])

    def _settle(self) -> None:
        """Take back what a step put beside the slots instead of into them: positions, for one."""
        copy_rows_(self._all, slice(len(self)), self._used)


def bytes_of_request(model: TransformerLM, tokens: int | None = None) -> int:
    """Bytes of the state of one request: the same at every position, but for layers that keep keys and values.

    Args:
        model: a language model.
        tokens: that the state has read; may be None where every layer has a state of constant size.

    Raises:
        ValueError: as for `Slots`, or no number of tokens where a layer keeps keys and values.
    """
    one = state_of_one(model)
    of_each = _token_bytes(one)
    if tokens is None and of_each:
        raise ValueError(f"expected a number of tokens: layers keep keys and values, {of_each:,} bytes of each token")
    return _fixed_bytes(one) + (tokens or 0) * of_each


def reserve(state: ModelState, tokens: int) -> None:
    """Make the room of keys and values that for so many tokens, where a layer keeps them."""
    for part in growing_parts(state).values():
        part.reserve(tokens)


@torch.inference_mode()
def state_of_one(model: TransformerLM) -> ModelState:
    """The state of one row after a token: all its tensors are there.

    Raises:
        ValueError: a layer whose state grows otherwise than by the keys and values of its tokens.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.output_bias.device)
    _, state = model.extend_hidden(token, model.init_state(1))
    shapes = [shape_of(layer) for layer in state.layers]
    _, later = model.extend_hidden(token, state.clone())
    for index, (layer, (name, _)) in enumerate(zip(later.layers, model.config.layers(), strict=True)):
        if shape_of(layer) != shapes[index]:
            raise ValueError(
                f"expected layers whose state has a constant size, or keeps the keys and values of all tokens, found "
                f"{name} in layer {index}, whose state grows otherwise: such models generate by polysketch generate"
            )
    return state


def _fixed_bytes(one: ModelState) -> int:
    return one.nbytes - sum(part.nbytes - part.position.nbytes for part in growing_parts(one).values())


def _token_bytes(one: ModelState) -> int:
    return sum(part.token_bytes for part in growing_parts(one).values())
