"""Many requests at once, that come and go: continuous batching over states in slots. Token ids only."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from polysketch.generation.prompts import as_ids, require_stop
from polysketch.generation.randomness import PromptUniforms
from polysketch.generation.requests import Event, Finish, Request
from polysketch.generation.rows import ids_of
from polysketch.generation.sampling import Sampler, tokens_seen
from polysketch.generation.slots import Slots, reserve
from polysketch.generation.snapshots import Snapshots
from polysketch.models import ModelState, TransformerLM

__all__ = ["Engine"]

_FEW = 16
"""Tokens of a prompt that steps may feed one by one. A pass of their own costs as much as a step of many rows."""

_NOT_DRAWN = torch.zeros(1, dtype=torch.float64)


class Engine:
    """Continues the prompts of many requests together.

    Each `step` moves every request in a slot on by one token, and reads at most `chunk` tokens of waiting prompts, in
    the order of their coming: so nobody waits longer than that for a long prompt. The last few tokens of a prompt are
    fed by the steps themselves where many requests run and a snapshot has what is before.

    A request's tokens are those that `generate` gives for its prompt alone with its settings, whatever else is in the
    batch. (Rounding may differ, and so, very rarely, may a token.)

    The number of slots bounds memory where a state has the same size at every position. One more state is that of the
    prompt that is being read; snapshots have a bound of their own. Layers that keep keys and values (softmax, for one)
    take memory for every token: a request is begun when `state_bytes` hold what it takes at its longest beside what the
    others take at theirs. So nothing is ever stopped because something else grew.

    Snapshots are taken where a prompt is a power of two of chunks long, at its last whole chunk, and where a request
    ends: the next turn of a conversation, or another prompt with the same beginning, goes on from there.

    One thread at a time may call it.

    Args:
        model: a language model; put into evaluation mode.
        slots: requests that are continued at the same time, at least 1.
        chunk: prompt tokens read between two steps, at least 1.
        snapshots: where states after beginnings of prompts are kept; None keeps none.
        state_bytes: for the states of all requests that are read or continued; None for no bound but the slots.

    Raises:
        ValueError: a number below 1, or a layer whose state grows otherwise than by keys and values, by its name.

    Attributes:
        slots: the states of the requests that are continued.
        snapshots: as given.
    """

    def __init__(
        self,
        model: TransformerLM,
        *,
        slots: int,
        chunk: int = 512,
        snapshots: Snapshots | None = None,
        state_bytes: int | None = None,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"expected a chunk of at least 1 token, found {chunk}")
        self._model = model.eval()
        self._chunk = chunk
        self._state_bytes = math.inf if state_bytes is None else state_bytes
        self.snapshots = Snapshots(0) if snapshots is None else snapshots
        with torch.inference_mode():
            self.slots = Slots(model, slots)
        self._tickets = 0
        self._waiting: deque[_Sequence] = deque()
        self._reading: _Sequence | None = None
        self._running: list[_Sequence] = []  # in the order of their slots
        self._untold: list[Event] = []  # of a step that has not ended

    @property
    def num_waiting(self) -> int:
        """Requests of whose prompt nothing is read yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests whose prompt is being read, or that are continued."""
        return len(self._running) + (self._reading is not None)

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self.num_waiting and not self.num_running

    def add(self, request: Request) -> int:
        """Queue a request.

        Returns:
            Its ticket, which events carry.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, no token to make, or a state that never fits.
        """
        self.check(request)
        self._tickets += 1
        self._waiting.append(_Sequence(self._tickets, request))
        return self._tickets

    def check(self, request: Request) -> None:
        """Refuse what `add` refuses; any thread may ask."""
        _require_usable(request, self._model.config.vocab_size)
        needed = self._bytes_of(_tokens_of(request))
        if needed > self._state_bytes:
            raise ValueError(
                f"expected a request whose state takes at most {self._state_bytes:,} bytes, found one of "
                f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones, which takes {needed:,}: "
                "ask for fewer"
            )

    @torch.inference_mode()
    def cancel(self, ticket: int) -> bool:
        """Forget a request; no event follows.

        Returns:
            Whether there was one.
        """
        if self._reading is not None and self._reading.ticket == ticket:
            self._reading = None
            return True
        for sequence in self._waiting:
            if sequence.ticket == ticket:
                self._waiting.remove(sequence)
                return True
        for slot, sequence in enumerate(self._running):
            if sequence.ticket == ticket:
                self._leave(slot)
                return True
        return False

    def abandon(self, error: str) -> list[Event]:
        """End every request with a failure: for whoever caught an exception of `step`, after which states are unsure.

        Args:
            error: what failed, in one line.

        Returns:
            What the step that failed had found before, then the failures.
        """
        sequences = [*self._running, *([self._reading] if self._reading else []), *self._waiting]
        known, self._untold = self._untold, []
        ended = {event.ticket for event in known if event.finish is not None}
        self._running, self._reading = [], None
        self._waiting.clear()
        self.slots.clear()
        return [*known, *(each.failed(error) for each in sequences if each.ticket not in ended)]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One token for every request in a slot, then a chunk of prompts; what became known, in this order."""
        self._decode()
        for event in self._read():
            self._untold.append(event)
        told, self._untold = self._untold, []
        return told

    def _decode(self) -> None:
        if not self._running:
            return
        ids = torch.tensor([[each.next_fed] for each in self._running], device=self._device)
        logits, _ = self._model.extend(ids, self.slots.state)
        for slot, each in enumerate(self._running):
            each.position += 1
            self._keep(each, partial(self.slots.copy, slot))
        read = [slot for slot, each in enumerate(self._running) if each.is_read]
        events = _chosen(logits[read, -1], [self._running[slot] for slot in read])
        self._untold += events
        for slot, event in reversed(list(zip(read, events, strict=True))):
            if event.finish is not None:
                self._end(slot, event.finish)

    def _read(self) -> Iterator[Event]:
        budget = self._chunk
        while budget:
            if self._reading is None and not self._begin():
                return
            sequence = self._reading
            assert sequence is not None
            if self._is_fed_by_steps(sequence):
                budget -= min(sequence.left, budget)
                self._take_slot(sequence)
                continue
            length = sequence.next_span(self._chunk, budget)
            logits = self._read_span(sequence, length)
            budget -= length
            if sequence.is_read:
                yield self._first_token(sequence, logits)

    def _is_fed_by_steps(self, sequence: "_Sequence") -> bool:
        """Whether steps feed the rest of its prompt: a pass would keep all who run waiting longer than they keep it.

        A state that has read nothing has no tensors yet to put into a slot.
        """
        return sequence.position > 0 and sequence.left <= min(len(self._running), _FEW)

    def _begin(self) -> bool:
        """Take the next prompt, where one waits, and a slot and the memory of its state will be free for it."""
        if not self._waiting or len(self.slots) == self.slots.count or not self._fits(self._waiting[0]):
            return False
        sequence = self._reading = self._waiting.popleft()
        found = self.snapshots.longest(sequence.prompt[:-1])  # the last token is read in any case, for its logits
        if found is None:
            sequence.state = self._model.init_state(1)
        else:
            sequence.reused, sequence.state = found
            sequence.position = sequence.reused
        reserve(sequence.state, sequence.most_tokens)
        return True

    def _fits(self, sequence: "_Sequence") -> bool:
        """Whether its state and those of the requests in slots, all at their longest, are within the bound."""
        together = [*self._running, sequence]
        return sum(self._bytes_of(each.most_tokens) for each in together) <= self._state_bytes

    def _bytes_of(self, tokens: int) -> int:
        return self.slots.fixed_bytes + tokens * self.slots.token_bytes

    def _read_span(self, sequence: "_Sequence", length: int) -> Tensor:
        """Read so many tokens of a prompt; the logits (1, vocab) after them."""
        assert sequence.state is not None
        start, end = sequence.position, sequence.position + length
        ids = torch.tensor([sequence.prompt[start:end]], device=self._device)
        hidden, _ = self._model.extend_hidden(ids, sequence.state)
        sequence.position = end
        self._keep(sequence, sequence.state.clone)
        return self._model.logits(hidden[:, -1:])[:, 0]

    def _keep(self, sequence: "_Sequence", state: Callable[[], ModelState]) -> None:
        """A snapshot, where one is taken of this prompt."""
        if _is_kept(sequence.position, len(sequence.prompt), self._chunk):
            self.snapshots.keep(sequence.prompt[: sequence.position], state())

    def _take_slot(self, sequence: "_Sequence") -> None:
        assert sequence.state is not None
        self.slots.put(sequence.state)
        sequence.state = None
        self._running.append(sequence)
        self._reading = None

    def _first_token(self, sequence: "_Sequence", logits: Tensor) -> Event:
        (event,) = _chosen(logits, [sequence])
        self._take_slot(sequence)
        if event.finish is not None:
            self._end(len(self._running) - 1, event.finish)
        return event

    def _end(self, slot: int, finish: Finish | None) -> None:
        sequence = self._running[slot]
        if finish != "error":
            self.snapshots.keep(sequence.tokens[: sequence.position], self.slots.copy(slot))
        self._leave(slot)

    def _leave(self, slot: int) -> None:
        """As in the slots: the last one moves to the place that is free."""
        self.slots.free(slot)
        last = self._running.pop()
        if slot < len(self._running):
            self._running[slot] = last

    @property
    def _device(self) -> torch.device:
        return self._model.output_bias.device


class _Sequence:
    """A request on its way.

    Attributes:
        ticket: its number.
        prompt: the request's.
        most_tokens: that its state will have read at its end.
        position: tokens in its state.
        reused: prompt tokens that came from a snapshot.
        state: while the prompt is read by passes of its own; then it is in a slot.
    """

    def __init__(self, ticket: int, request: Request) -> None:
        self.ticket = ticket
        self.prompt = as_ids(request.prompt)
        self._stop_ids = ids_of(request.stop_ids)
        self.most_tokens = _tokens_of(request)
        self.position = 0
        self.reused = 0
        self.state: ModelState | None = None
        self._request = request
        self._uniforms = PromptUniforms(self.prompt, request.seed, request.sample)
        self._made: list[int] = []
        self._seen: Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt and all that was chosen, a stop id included."""
        return self.prompt + self._made

    @property
    def next_fed(self) -> int:
        """The token that its state has not read yet: of the prompt, or the last one chosen."""
        return self._made[-1] if self.is_read else self.prompt[self.position]

    @property
    def left(self) -> int:
        """Tokens of the prompt to read."""
        return len(self.prompt) - self.position

    @property
    def sampler(self) -> Sampler:
        """How the next token is chosen."""
        return self._request.sampler

    @property
    def is_read(self) -> bool:
        """Whether the state has all of the prompt."""
        return self.position >= len(self.prompt)

    def next_span(self, chunk: int, budget: int) -> int:
        """How many tokens of the prompt to read next: not beyond a multiple of the chunk, where snapshots are taken."""
        return min(chunk - self.position % chunk, len(self.prompt) - self.position, budget)

    def next_uniform(self) -> Tensor:
        """float64 (1,) in [0, 1); not drawn where the most probable token is taken."""
        return self._uniforms.next() if self.sampler.temperature else _NOT_DRAWN

    def seen(self, vocab_size: int) -> Tensor:
        """Which tokens stood in the text so far: bool (1, vocab)."""
        if self._seen is None:
            self._seen = tokens_seen([self.tokens], vocab_size)
        return self._seen

    def take(self, token: int) -> Event:
        """Note the next token and say what that means."""
        self._made.append(token)
        if self._seen is not None:
            self._seen[0, token] = True
        if token in self._stop_ids:
            return self._event(None, "stop")
        if self._request.until is not None and self._request.until(token):
            return self._event(token, "stop")
        return self._event(token, "length" if len(self._made) >= self._request.max_new_tokens else None)

    def failed(self, error: str) -> Event:
        """The end, for a reason."""
        return Event(self.ticket, None, "error", self.position, self.reused, error)

    def _event(self, token: int | None, finish: Finish | None) -> Event:
        return Event(self.ticket, token, finish, self.position, self.reused)


def _chosen(logits: Tensor, sequences: Sequence[_Sequence]) -> list[Event]:
    """What the (rows, vocab) logits of these requests give; rows of the same settings are drawn together."""
    finite = torch.isfinite(logits).all(-1).tolist()
    groups: dict[Sampler, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if finite[row]:
            groups.setdefault(sequence.sampler, []).append(row)
    tokens: dict[int, int] = {}
    for sampler, rows in groups.items():
        uniforms = torch.cat([sequences[row].next_uniform() for row in rows]).to(logits.device)
        seen = None
        if sampler.looks_back:
            seen = torch.cat([sequences[row].seen(logits.shape[-1]) for row in rows]).to(logits.device)
        tokens |= zip(rows, sampler.choose(logits[rows], uniforms, seen).tolist(), strict=True)
    damaged = "expected finite logits, found NaN or infinity: the model's weights are probably damaged"
    return [each.take(tokens[row]) if row in tokens else each.failed(damaged) for row, each in enumerate(sequences)]


def _is_kept(position: int, prompt: int, chunk: int) -> bool:
    """Whether a snapshot is taken here: at 1, 2, 4, 8 ... chunks, and at the last whole one before the prompt's end."""
    chunks, rest = divmod(position, chunk)
    if rest or not chunks or position > prompt:
        return False
    return chunks & (chunks - 1) == 0 or position + chunk >= prompt


def _tokens_of(request: Request) -> int:
    """Tokens that its state reads at most: the last one is not fed."""
    return len(request.prompt) + request.max_new_tokens - 1


def _require_usable(request: Request, vocab_size: int) -> None:
    if request.max_new_tokens < 1:
        raise ValueError(f"expected max_new_tokens of at least 1, found {request.max_new_tokens}")
    if len(request.prompt) == 0:
        raise ValueError("expected at least one token in the prompt, found none: begin with the end-of-text token")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        raise ValueError(
            f"expected token ids from 0 to {vocab_size - 1}, found {min(request.prompt)} to {max(request.prompt)}: the "
            "prompt was probably encoded with another tokenizer than the model's"
        )
    require_stop(request.stop_ids, vocab_size)
