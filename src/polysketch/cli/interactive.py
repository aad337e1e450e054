"""A conversation in the terminal: the model's state stays, so a turn reads what is new and no more."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polysketch.cli.terminal import write_visible
from polysketch.data import TokenizerLike
from polysketch.generation import TextStream, generate
from polysketch.models import TransformerLM


@dataclass(frozen=True)
class Conversation:
    """How turns are taken.

    Attributes:
        model, tokenizer: of the run.
        stop: strings that end a reply, beside the end of a text.
        settings: of `generate`: max_new_tokens, temperature, top_k, top_p.
        seed: of the first turn; the next has the next.
    """

    model: TransformerLM
    tokenizer: TokenizerLike
    stop: tuple[str, ...]
    settings: dict[str, Any]
    seed: int = 0

    def hold(self, beginning: str) -> None:
        """Read a line, reply, and so on until the input ends.

        Ctrl-C ends a reply; where none is being written it ends the conversation.

        Args:
            beginning: text before the first line.
        """
        tokens = self.tokenizer.encode(beginning) or [self.tokenizer.end_of_text]
        state = self.model.init_state(1)
        print("Ctrl-C ends a reply, Ctrl-D the conversation", file=sys.stderr)
        for turn, line in enumerate(_lines()):
            tokens += self.tokenizer.encode(line)
            unread = tokens[int(state.position[0]) :]
            stream = TextStream(self.tokenizer.decode_bytes, self.stop)
            with _interruptible() as interrupted:

                def show(row: int, token: int, stream: TextStream = stream, ended: list[bool] = interrupted) -> bool:
                    ended_here = stream.add(token)
                    write_visible(stream.take())
                    return ended_here or bool(ended)

                end = self.tokenizer.end_of_text
                result = generate(
                    self.model, [unread], state=state, seed=self.seed + turn, stop=end, on_token=show, **self.settings
                )
            write_visible(stream.finish() + "\n")
            tokens += result.tokens[0]


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
