"""Bodies of requests: every field is what it should be, or is refused by its name."""

import pytest

from polysketch.generation import Sampler
from polysketch.serving.asked import asked_chat, asked_completion
from polysketch.serving.errors import ApiError
from polysketch.serving.limits import Limits

LIMITS = Limits(new_tokens=100)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [2]], ["a", [2]]),
    ],
)
def test_prompts_of_all_kinds_are_a_list_of_prompts(prompt, expected):
    assert asked_completion({"prompt": prompt}, "small", LIMITS).prompts == expected


def test_settings_have_the_usual_values():
    asked = asked_completion({"prompt": "x"}, "small", LIMITS)
    assert (asked.new_tokens, asked.sampler, asked.seed, asked.samples) == (16, Sampler(1.0), None, 1)
    assert (asked.stop, asked.stream, asked.with_usage, asked.with_running_usage) == ((), False, False, False)
    assert asked_chat({"messages": MESSAGES}, "small", LIMITS).new_tokens == 100


def test_settings_are_read():
    body = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "repetition_penalty": 1.2,
        "seed": 5,
        "n": 2,
        "stop": "end",
        "stream": True,
        "user": "me",
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = asked_chat(
        {"messages": MESSAGES, "model": "small", "max_tokens": 7, "stream_options": options, **body}, "small", LIMITS
    )
    assert asked.sampler == Sampler(0.0, 3, 0.5, 1.2)
    assert (asked.new_tokens, asked.seed, asked.samples, asked.stop) == (7, 5, 2, ("end",))
    assert (asked.stream, asked.with_usage, asked.with_running_usage) == (True, True, True)


def test_what_asks_for_nothing_is_let_through():
    harmless = {"presence_penalty": 0, "logit_bias": {}, "tools": [], "logprobs": None, "best_of": 1}
    assert asked_completion({"prompt": "x", **harmless, "unknown": None}, "small", LIMITS).prompts == ["x"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "expected a JSON object, found a list"),
        ({}, "prompt: expected a text, token ids, or a list of either, found nothing"),
        ({"prompt": []}, "prompt: expected a text"),
        ({"prompt": [1, "a"]}, "prompt: expected a text"),
        ({"prompt": [True]}, "prompt: expected a text"),
        ({"prompt": {}}, "prompt: expected a text, token ids, or a list of either, found an object"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number from 1 to 100, found 0"),
        ({"max_tokens": 101}, "from 1 to 100, found 101"),
        ({"max_tokens": "7"}, "max_tokens: expected a whole number"),
        ({"max_tokens": True}, "max_tokens: expected a whole number"),
        ({"n": 0}, "n: expected a whole number from 1 to 1000000, found 0"),
        ({"temperature": "hot"}, "temperature: expected a number, found 'hot'"),
        ({"temperature": -0.5}, "temperature of at least 0, found -0.5"),
        ({"temperature": float("nan")}, "finite temperature"),
        ({"top_p": 0}, "top_p above 0"),
        ({"top_p": True}, "top_p: expected a number"),
        ({"top_k": 1.5}, "top_k: expected a whole number"),
        ({"seed": "x"}, "seed: expected a whole number"),
        ({"stop": [""]}, "stop: expected a text"),
        ({"stop": 3}, "stop: expected a text, or a list of texts, none of them empty, found 3"),
        ({"stop": ""}, "none of them empty, found ''"),
        ({"stop": {"a": 1}}, "none of them empty, found an object"),
        ({"stop": ["a"] * 17}, "stop: expected at most 16 texts, found 17"),
        ({"stream": 1}, "stream: expected true or false"),
        ({"stream_options": 1}, "stream_options: expected an object"),
        ({"stream_options": {"x": 1}}, "stream_options.x is not served here"),
        (
            {"stream_options": {"include_usage": "no"}},
            "stream_options.include_usage: expected true or false, found 'no'",
        ),
        ({"stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats: expected true or false, found 1"),
        ({"logprobs": 3}, "logprobs is not served here: leave it out"),
        ({"echo": True}, "echo is not served here"),
        ({"presence_penalty": 0.5}, "presence_penalty is not served here"),
        ({"nonsense": 1}, "nonsense is not served here"),
        ({"messages": MESSAGES}, "messages is not served here"),
        ({"model": "other"}, "expected the model 'small'"),
    ],
)
def test_a_completion_that_is_none_is_refused(body, message):
    body = {"prompt": "x", **body} if body else body
    with pytest.raises(ApiError) as refused:
        asked_completion(body, "small", LIMITS)
    assert message in str(refused.value)
    assert refused.value.status == (404 if "model" in message else 400)


HUGE = 10**4300 - 1
"""The longest whole number that Python reads out of JSON."""


@pytest.mark.parametrize(
    "body",
    [
        *({name: HUGE} for name in ("n", "max_tokens", "temperature", "model", "stop", "echo", "stream", "prompt")),
        *({name: "x" * 9999} for name in ("n", "model", "seed")),
        *({"top_k": -HUGE}, {"stream_options": {"include_usage": HUGE}}, {"stream_options": {"x" * 9999: 1}}),
        {"x" * 9999: 1},
    ],
    ids=lambda body: next(iter(body))[:20],
)
def test_what_is_refused_is_not_repeated_at_length(body):
    with pytest.raises(ApiError) as refused:
        asked_completion({"prompt": "x", **body}, "small", LIMITS)
    assert len(str(refused.value)) < 600
    assert len(refused.value.param or "") < 100


def test_usage_that_is_not_set_is_not_sent():
    options = {"include_usage": False, "continuous_usage_stats": None}
    asked = asked_completion({"prompt": "x", "stream_options": options}, "small", LIMITS)
    assert (asked.with_usage, asked.with_running_usage) == (False, False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: expected a list of messages"),
        ([], "messages: expected a list of messages"),
        ("Hi", "messages: expected a list of messages"),
        ([{"content": "Hi"}], "messages with a role and a content"),
        ([{"role": "user"}], "messages whose content is text, found nothing"),
        ([{"role": "user", "content": 3}], "messages whose content is text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages whose content is text"),
    ],
)
def test_a_chat_that_is_none_is_refused(messages, message):
    with pytest.raises(ApiError, match=message):
        asked_chat({"messages": messages}, "small", LIMITS)


@pytest.mark.parametrize(
    ("name", "value"), [("tool_calls", [{"id": "a"}]), ("name", "Ann"), ("tool_call_id", "a"), ("audio", {"id": "a"})]
)
def test_what_a_message_holds_and_no_template_reads_is_refused_by_its_name(name, value):
    message = {"role": "user", "content": "Hi", "refusal": None}
    with pytest.raises(ApiError, match=f"messages.{name} is not served here"):
        asked_chat({"messages": [{**message, name: value}]}, "small", LIMITS)
    assert asked_chat({"messages": [{**message, name: None}]}, "small", LIMITS).prompts


@pytest.mark.parametrize("changes", [{"new_tokens": 0}, {"prompt_tokens": 0}, {"body_bytes": 0}, {"queue": -1}])
def test_limits_that_admit_nothing_are_refused(changes):
    with pytest.raises(ValueError, match="expected"):
        Limits(**changes)


def test_zero_is_not_false():
    with pytest.raises(ApiError, match="logprobs is not served here"):
        asked_completion({"prompt": "x", "logprobs": 0}, "small", LIMITS)
    assert asked_completion({"prompt": "x", "logprobs": False, "presence_penalty": 0.0}, "small", LIMITS).samples == 1
