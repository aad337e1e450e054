"""What the body of a request asks for: JSON of OpenAI's interface, checked field by field."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polysketch.generation import Sampler
from polysketch.serving.errors import ApiError
from polysketch.serving.limits import Limits

__all__ = ["Asked", "asked_chat", "asked_completion"]

_USUAL_COMPLETION = 16
"""New tokens of a completion that does not say how many: OpenAI's number."""

_MOST_SAMPLES = 1_000_000
"""Continuations of a prompt: more than any server gives at once. The server's own, smaller bound is asked later."""


@dataclass(frozen=True)
class Asked:
    """A request's settings.

    Attributes:
        prompts: texts, or token ids, to continue; of a chat, its messages alone.
        new_tokens: of each continuation.
        sampler: how tokens are chosen.
        seed: of the draws; None for any.
        samples: continuations of each prompt.
        stop: strings that end a continuation.
        stream: whether pieces are sent as they come.
        with_usage: whether the numbers of tokens are sent at the end of a stream.
        with_running_usage: whether they are sent with every piece too.
    """

    prompts: list[Any]
    new_tokens: int
    sampler: Sampler
    seed: int | None
    samples: int
    stop: tuple[str, ...]
    stream: bool
    with_usage: bool
    with_running_usage: bool


_LONGEST_SHOWN = 60
"""Letters of what a client sent that a message repeats."""

_SHARED = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "n", "stop"),
    *("stream", "stream_options", "user"),
)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
"""Fields that are known and not served: with these values, or null, they ask for nothing."""


def asked_completion(body: Any, model: str, limits: Limits) -> Asked:
    """What /v1/completions is asked for.

    Args:
        body: the JSON value.
        model: the name of the model that is served.
        limits: of the server.

    Raises:
        ApiError: a field that is missing, unknown, of another type, or beyond the limits.
    """
    fields = _fields(body, (*_SHARED, "prompt"), model)
    if "prompt" not in fields:
        raise _wrong("prompt", "a text, token ids, or a list of either", None)
    return _asked(fields, _prompts(fields["prompt"]), limits, fields.get("max_tokens", _USUAL_COMPLETION))


def asked_chat(body: Any, model: str, limits: Limits) -> Asked:
    """What /v1/chat/completions is asked for; arguments and errors as for `asked_completion`."""
    fields = _fields(body, (*_SHARED, "messages", "max_completion_tokens"), model)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of messages", messages)
    length = fields.get("max_completion_tokens", fields.get("max_tokens", limits.new_tokens))
    return _asked(fields, [[_message(each) for each in messages]], limits, length)


def _fields(body: Any, known: tuple[str, ...], model: str) -> dict[str, Any]:
    """The fields that are set; those that ask for what is not served are refused."""
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, found {_kind(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in known and not any(_same(value, one) for one in _WITHOUT_EFFECT.get(name, ())):
            told = _told(name)
            raise ApiError(400, f"{told} is not served here: leave it out", param=told, code="unsupported_parameter")
    named = fields.get("model", model)
    if named != model:
        message = f"expected the model {model!r}, which is served here, found {_shown(named)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return fields


def _asked(fields: dict[str, Any], prompts: list[Any], limits: Limits, new_tokens: Any) -> Asked:
    with_usage, with_running_usage = _usage_of(_read(fields, "stream_options", dict, {}))
    return Asked(
        prompts=prompts,
        new_tokens=_between("max_tokens", new_tokens, 1, limits.new_tokens),
        sampler=_sampler(fields),
        seed=_read(fields, "seed", int, None),
        samples=_between("n", fields.get("n", 1), 1, _MOST_SAMPLES),
        stop=_stop(fields.get("stop", ()), limits),
        stream=_read(fields, "stream", bool, False),
        with_usage=with_usage,
        with_running_usage=with_running_usage,
    )


def _usage_of(options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether numbers of tokens are sent at the end of a stream, and with every piece."""
    known = ("include_usage", "continuous_usage_stats")
    unknown = sorted(map(_told, options.keys() - set(known)))
    if unknown:
        raise ApiError(400, f"stream_options.{unknown[0]} is not served here: leave it out", param="stream_options")
    fields = {f"stream_options.{name}": value for name, value in options.items() if value is not None}
    with_usage, with_running_usage = (_read(fields, f"stream_options.{name}", bool, False) for name in known)
    return with_usage, with_running_usage


def _sampler(fields: dict[str, Any]) -> Sampler:
    temperature = _read(fields, "temperature", float, 1.0)
    try:
        top_k, top_p = _read(fields, "top_k", int, None), _read(fields, "top_p", float, None)
        return Sampler(temperature, top_k, top_p, _read(fields, "repetition_penalty", float, 1.0))
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _prompts(prompt: Any) -> list[Any]:
    """A list of texts and lists of ids."""
    if isinstance(prompt, str) or _are(prompt, _is_int):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or _are(each, _is_int) for each in prompt):
        return prompt
    raise _wrong("prompt", "a text, token ids, or a list of either", prompt)


_UNREAD_OF_MESSAGES = ("name", "tool_calls", "tool_call_id", "function_call", "audio")
"""Fields of a message that would change the answer, where they are not null or empty, and are not served."""


def _message(message: Any) -> dict[str, str]:
    """Role and text of a message; a text in several parts is joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", "messages with a role and a content", message)
    for name in (name for name in _UNREAD_OF_MESSAGES if message.get(name)):
        told = f"messages.{name}"
        raise ApiError(400, f"{told} is not served here: leave it out", param=told, code="unsupported_parameter")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_text_of(part) for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(content, str):
        raise _wrong("messages", "messages whose content is text", message.get("content"))
    return {"role": message["role"], "content": content}


def _text_of(part: Any) -> str | None:
    """The text of a part of a message; None where it is no text."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _stop(stop: Any, limits: Limits) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) and each for each in texts):
        raise _wrong("stop", "a text, or a list of texts, none of them empty", stop)
    if len(texts) > limits.stop_strings:
        raise _wrong("stop", f"at most {limits.stop_strings} texts", len(texts))
    return tuple(texts)


def _read(fields: dict[str, Any], name: str, kind: type, usual: Any) -> Any:
    """A field of a type, its usual value where it is not set; whole numbers are numbers too."""
    value = fields.get(name, usual)
    if value is usual:
        return value
    expected, fits = _KINDS[kind]
    if not fits(value):
        raise _wrong(name, expected, value)
    return float(value) if kind is float else value


def _between(name: str, value: Any, least: int, most: int) -> int:
    if not _is_int(value) or not least <= value <= most:
        raise _wrong(name, f"a whole number from {least} to {most}", value)
    return value


def _told(name: str) -> str:
    """The beginning of a name out of JSON; half of a surrogate pair, which no answer can hold, as its escape."""
    return name[:_LONGEST_SHOWN].encode(errors="backslashreplace").decode()


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where 0 is not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_int(value) and abs(value) < 2**63)


def _are(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(check, value))


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", _is_int),
    float: ("a number", _is_number),
    dict: ("an object", lambda value: isinstance(value, dict)),
}
"""Of each type of a field: its name, and whether a value is of it."""


def _wrong(name: str, expected: str, found: Any) -> ApiError:
    return ApiError(400, f"{name}: expected {expected}, found {_shown(found)}", param=name)


def _shown(value: Any) -> str:
    """The beginning of a value, or what it is."""
    return repr(value)[:_LONGEST_SHOWN] if isinstance(value, int | float | str) else _kind(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")
