"""Answers as JSON objects of OpenAI's interface: of a completion or a chat, whole or in pieces."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "Usage"]


@dataclass
class Usage:
    """Numbers of tokens.

    Attributes:
        prompt: of all prompts, each counted once.
        new: made so far, of all continuations.
        reused_of: by the number of a prompt, those of its tokens that a snapshot had.
    """

    prompt: int
    new: int = 0
    reused_of: dict[int, int] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        """Of all prompts."""
        return sum(self.reused_of.values())

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }


@dataclass(frozen=True)
class Answer:
    """What all answers to one request have in common.

    Attributes:
        model: its name.
        id: made up, new for each request.
        created: seconds since 1970.
    """

    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [self._choice(index, *each) for index, each in enumerate(zip(texts, reasons, strict=True))]
        return {**self._head(streamed=False), "choices": choices, "usage": usage.body}

    def begin(self, continuations: int) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def piece(self, index: int, text: str, reason: str | None, usage: Usage | None) -> dict[str, Any]:
        """A piece of a stream."""
        body = {**self._head(streamed=True), "choices": [self._part(index, text, reason)]}
        return body if usage is None else {**body, "usage": usage.body}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last piece of a stream, where it was asked for."""
        return {**self._head(streamed=True), "choices": [], "usage": usage.body}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return self._choice(index, text, reason)


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        return {"id": f"cmpl-{self.id}", "object": "text_completion", "created": self.created, "model": self.model}

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    def begin(self, continuations: int) -> list[dict[str, Any]]:
        """Who speaks."""
        said = {"role": "assistant", "content": ""}
        return [
            {**self._head(streamed=True), "choices": [{"index": index, "delta": said, "finish_reason": None}]}
            for index in range(continuations)
        ]

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def _part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
