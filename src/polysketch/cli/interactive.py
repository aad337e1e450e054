"""A conversation in the terminal: the model's state stays, so a turn reads what is new and no more."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from polysketch.cli.terminal import write_visible
from polysketch.data import TokenizerLike
from polysketch.generation import TextStream, generate
from polysketch.models import TransformerLM

__all__ = ["ChatTurns", "Conversation", "TextTurns"]


class Turns(Protocol):
    """What the model is given to read at a turn."""

    def ask(self, line: str) -> list[int]:
        """Take a line, and give the token ids of all that was said."""

    def answer(self, tokens: list[int], text: str) -> None:
        """Take the reply."""


class TextTurns:
    """Lines and replies are one text, which goes on."""

    def __init__(self, tokenizer: TokenizerLike, beginning: str) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokenizer.encode(beginning) or [tokenizer.end_of_text]

    def ask(self, line: str) -> list[int]:
        """As `Turns` has it."""
        self._tokens += self._tokenizer.encode(line)
        return list(self._tokens)

    def answer(self, tokens: list[int], text: str) -> None:
        """As `Turns` has it."""
        self._tokens += tokens


class ChatTurns:
    """Lines are messages of a user and replies of an assistant, as a chat template writes them."""

    def __init__(self, render: Callable[[list[dict[str, str]]], list[int]]) -> None:
        self._render = render
        self._messages: list[dict[str, str]] = []

    def ask(self, line: str) -> list[int]:
        """As `Turns` has it."""
        self._messages.append({"role": "user", "content": line.removesuffix("\n")})
        return self._render(self._messages)

    def answer(self, tokens: list[int], text: str) -> None:
        """As `Turns` has it."""
        self._messages.append({"role": "assistant", "content": text})


@dataclass(frozen=True)
class Conversation:
    """How turns are taken.

    Attributes:
        model, tokenizer: of the run.
        turns: what is read at each.
        stop: strings that end a reply.
        stop_ids: token ids that do.
        settings: of `generate`: max_new_tokens, temperature, top_k, top_p, repetition_penalty.
        seed: of the first turn; the next has the next.
    """

    model: TransformerLM
    tokenizer: TokenizerLike
    turns: Turns
    stop: tuple[str, ...]
    stop_ids: Collection[int]
    settings: dict[str, Any]
    seed: int = 0

    def hold(self, first: Iterable[str] = ()) -> None:
        """Read a line, reply, and so on until the input ends.

        Ctrl-C ends a reply; where none is being written it ends the conversation. A template may write a reply in
        other tokens than the model did: then everything is read again.

        Args:
            first: lines before those of the input.
        """
        read: list[int] = []
        state = self.model.init_state(1)
        print("Ctrl-C ends a reply, Ctrl-D the conversation", file=sys.stderr)
        for turn, line in enumerate(chain(first, _lines())):
            tokens = self.turns.ask(line)
            if tokens[: len(read)] != read:
                state, read = self.model.init_state(1), []
            stream = TextStream(self.tokenizer.known_bytes, self.stop)
            pieces: list[str] = []
            with _interruptible() as interrupted:

                def show(
                    row: int,
                    token: int,
                    stream: TextStream = stream,
                    pieces: list[str] = pieces,
                    ended: list[bool] = interrupted,
                ) -> bool:
                    ended_here = stream.add(token)
                    pieces.append(stream.take())
                    write_visible(pieces[-1])
                    return ended_here or bool(ended)

                result = generate(
                    self.model,
                    [tokens[len(read) :]],
                    state=state,
                    seed=self.seed + turn,
                    stop=self.stop_ids,
                    on_token=show,
                    **self.settings,
                )
            pieces.append(stream.finish())
            write_visible(pieces[-1] + "\n")
            self.turns.answer(result.tokens[0], "".join(pieces))
            read = [*tokens, *result.tokens[0]][: int(state.position[0])]


def _lines() -> Iterator[str]:
    """The lines of the input, each with its end; a sign that one is waited for, where a person looks on."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


@contextlib.contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Inside, Ctrl-C adds to the list that is given: a step is never left half done."""
    seen: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(True))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
