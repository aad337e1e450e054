"""What the client of OpenAI does not send: bad requests, other sites' pages, monitors, signals."""

import http.client
import json
import os
import re
import signal
import threading
from urllib.parse import urlsplit

import pytest

from polysketch.generation import Engine
from polysketch.serving.app import build_app
from polysketch.serving.limits import Limits
from polysketch.serving.running import address_of, how_to_ask, listen, run_app
from polysketch.serving.worker import Worker

JSON = {"Content-Type": "application/json"}
HUGE = "9" * 4300  # more digits are no number in JSON as Python reads it


def ask(address: str, method: str, path: str, body: bytes | str | None = None, headers: dict | None = None):
    """Status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("GET", "/nope", None, {}, 404, "Not Found: GET /nope"),
        ("GET", "/v1/completions", None, {}, 405, "Method Not Allowed"),
        ("GET", "/v1/models/other", None, {}, 404, "expected the model 'small', found 'other'"),
        ("POST", "/v1/completions", "{}", {}, 415, "Content-Type: application/json"),
        ("POST", "/v1/completions", "{", JSON, 400, "expected JSON"),
        ("POST", "/v1/completions", "{", {"Content-Type": "Application/JSON; x=y"}, 400, "expected JSON"),
        ("POST", "/v1/completions", b"\xff", JSON, 400, "expected JSON"),
        ("POST", "/v1/completions", "[" * 100_000, JSON, 400, "expected JSON"),
        ("POST", "/v1/completions", '{"prompt": "\\ud800"}', JSON, 400, "half a surrogate pair"),
        ("POST", "/v1/completions", '{"prompt": "x", "\\ud800": 0}', JSON, 400, "\\ud800 is not served here"),
        ("POST", "/v1/completions", json.dumps({"prompt": "x", "n": 10**6}), JSON, 400, "continuations in a request"),
        (
            "POST",
            "/v1/completions",
            json.dumps({"prompt": "x", "n": 10**15}),
            JSON,
            400,
            "from 1 to 1000000, found 1000",
        ),
        (
            "POST",
            "/v1/completions",
            f'{{"prompt": ["a", "b"], "n": {HUGE}}}',
            JSON,
            400,
            "from 1 to 1000000, found 999",
        ),
        (
            "POST",
            "/v1/completions",
            f'{{"prompt": [1, {HUGE}]}}',
            JSON,
            400,
            "expected token ids from 0 to 256, found 1",
        ),
        ("POST", "/v1/completions", json.dumps({"prompt": "x" * 5000}), JSON, 400, "at most 4000 tokens, found 5000"),
        ("POST", "/v1/completions", b" " * 200_001, JSON, 413, "at most 200000 bytes"),
        ("GET", "/v1/models", None, {"Host": "evil.example"}, 403, "by its own name"),
        ("GET", "/v1/models", None, {"Origin": "http://evil.example"}, 403, "by its own name"),
        ("GET", "/v1/models", None, {"Origin": "null"}, 403, "by its own name"),
    ],
)
def test_what_is_refused_is_refused_in_json(serve, method, path, body, headers, status, message):
    with serve(prompt_tokens=4000, body_bytes=200_000) as running:
        found, _, text = ask(running.address, method, path, body, headers)
    assert found == status
    error = json.loads(text)["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600
    assert error["type"] == "invalid_request_error"


def test_a_text_ends_where_the_model_declares_an_end(serve, server):
    """Not only where its tokenizer does: models that chat have an end of a turn beside the end of a text."""
    asked = json.dumps({"prompt": "abcdef", "max_tokens": 30, "temperature": 0})
    whole = server.greedy("abcdef", 30)
    end = whole[9]
    with serve(ends=(ord(end), 1)) as running:
        _, _, text = ask(running.address, "POST", "/v1/completions", asked, JSON)
    (choice,) = json.loads(text)["choices"]
    assert choice["text"] == whole[: whole.index(end)]
    assert choice["finish_reason"] == "stop"


def test_a_page_of_this_server_may_ask(server):
    for origin in (server.address, "http://localhost:1"):
        assert ask(server.address, "GET", "/v1/models", headers={"Origin": origin})[0] == 200


def test_the_token_guards_all_but_the_page_and_health(serve):
    with serve(token="secret") as running:
        assert [ask(running.address, "GET", path)[0] for path in ("/", "/health", "/metrics", "/v1/models")] == [
            *(200, 200, 401, 401)
        ]
        for path in ("/metrics", "/v1/models"):
            for right in ("Bearer secret", "bearer secret"):  # schemes are the same in any case, tokens are not
                assert ask(running.address, "GET", path, headers={"Authorization": right})[0] == 200
            for wrong in ("Bearer Secret", "Basic secret", "secret", "Bearer  secret"):
                assert ask(running.address, "GET", path, headers={"Authorization": wrong})[0] == 401
        assert ask(running.address, "GET", "/v1/models")[1]["www-authenticate"] == "Bearer"


def test_the_page_is_one_file_that_asks_nobody_else(server):
    status, headers, text = ask(server.address, "GET", "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in headers["content-security-policy"]
    assert not re.findall(r"https?://", text)


LINE = re.compile(r'(?P<name>polysketch_\w+)(?:\{\w+="[\w.+]+"\})? (?P<value>[\d.e+-]+)')


def test_figures_are_in_the_text_format_of_prometheus(serve):
    with serve() as running:
        body = json.dumps({"prompt": "some words", "max_tokens": 5, "temperature": 0})
        for _ in range(2):
            assert ask(running.address, "POST", "/v1/completions", body, JSON)[0] == 200
        assert running.idle()
        _, headers, text = ask(running.address, "GET", "/metrics")
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(LINE.fullmatch(line) for line in lines)
    typed = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {re.sub(r"_(bucket|sum|count)$", "", LINE.fullmatch(line)["name"]) for line in lines} == typed
    for expected in (
        'requests_finished_total{reason="length"} 2',
        "prompt_tokens_total 20",
        "reused_prompt_tokens_total 0",
        "new_tokens_total 10",
        "first_token_seconds_count 2",
        "requests_running 0",
        "slots 4",
    ):
        assert f"polysketch_{expected}" in lines


def test_a_signal_ends_a_server_when_its_requests_are_done(served):
    """As `kill` does: no more requests are taken, the running one is finished, and that is no failure."""
    engine = Engine(served.model, slots=1)
    app = build_app(served, Worker(engine, 1), Limits())
    found, before = [], signal.getsignal(signal.SIGTERM)

    def client() -> None:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
        body = json.dumps({"prompt": "x", "max_tokens": 40, "stream": True})
        connection.request("POST", "/v1/completions", body, JSON)
        response = connection.getresponse()
        response.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        found.append(response.read().decode())
        connection.close()

    thread = threading.Thread(target=client)
    with listen("127.0.0.1", 0) as listening:
        address = address_of(listening)
        run_app(app, listening, grace=10, ready=thread.start)
    thread.join()
    assert found[0].endswith("data: [DONE]\n\n")
    assert found[0].count("data: ") >= 39
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen.*127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_the_line_that_shows_how_to_ask_asks(server):
    line = how_to_ask(server.address, token=False)
    body = re.search(r"-d '(.*)'", line)[1]
    assert ask(server.address, "POST", "/v1/completions", body, JSON)[0] == 200
    assert "$POLYSKETCH_TOKEN" in how_to_ask(server.address, token=True)
