"""Requests of all kinds against a server, good ones and bad ones, with a SIGTERM in the middle.

    python -m campaigns.serving --count 10000 --seed 0

Clients ask at the same time: whole answers and streams, some of which are left early, read slowly or sent slowly;
bodies that are too large, cut short or no JSON; what is no HTTP; wrong tokens; fields that do not fit. Half way the
server is told to stop, and a new one goes on. What is a fault: an answer that is not the greedy text of its prompt, a
status that does not belong to the request, a request without an answer, a line of a traceback in the server's log,
slots that stay in use, memory that grows by more than a twentieth after the first third, an exit status.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polysketch.benchmarking.http_client import Answer, asked, read_answer, streamed
from polysketch.benchmarking.server_process import ServerProcess, never_ending, serving, write_run
from polysketch.data.tokenization import BytesTokenizer
from polysketch.generation import generate
from polysketch.models import ModelConfig, TransformerLM

_TOKEN = "of-the-campaign"
_PATH = "/v1/completions"
_NEW_TOKENS = 40
_LONGEST = 400  # characters of a prompt
_LIMITS = {
    "--concurrent": 6,
    "--queue": 12,
    "--max-prompt-tokens": 500,
    "--max-new-tokens": 64,
    "--max-body": 1,
    "--chunk": 64,
    "--state-memory": 4,
    "--snapshot-memory": 2,
    "--grace": 60,
}
_PATIENCE = 120.0  # seconds without an answer
_GROWTH = 1.05
_WARM = 1 / 3  # of the requests, before memory is first looked at


class FaultError(Exception):
    """What a campaign is to find; the message says what was asked and what came."""


@dataclass
class Found:
    """What came of a campaign.

    Attributes:
        faults: what should not be.
        kinds: requests by kind.
        statuses: of HTTP, by how often they came.
        refused: requests that found no server while it stopped.
        memory: bytes of the server when nothing was asked, after the first third and at the end of each server.
    """

    faults: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    memory: list[list[int | None]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print what it found, and return 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000, help="requests")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked")
    parser.add_argument("--users", type=int, default=24, help="clients at the same time")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    found = campaign(arguments.count, arguments.seed, arguments.users)
    report = {
        "count": arguments.count,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - begun, 1),
        "kinds": dict(found.kinds),
        "statuses": dict(found.statuses),
        "refused": found.refused,
        "memory": found.memory,
        "faults": len(found.faults),
        "first_faults": found.faults[:10],
    }
    print(json.dumps(report, indent=1))
    return 1 if found.faults else 0


def campaign(count: int, seed: int, users: int, program: Sequence[str] = ("-m", "polysketch")) -> Found:
    """Ask so many requests of two servers, one after the other.

    Args:
        count: of requests.
        seed: of the model and of what is asked.
        users: clients at the same time.
        program: what Python runs as the command `polysketch`.
    """
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model"
        model = _model(seed)
        write_run(run, model)
        texts = _expected(model, seed)
        numbers = itertools.count()
        for stopped in (True, False):
            flags = [str(word) for pair in _LIMITS.items() for word in pair]
            with serving(run, *flags, threads=1, token=_TOKEN, program=program) as process:
                _Clients(process, texts, found, seed).run(numbers, count // 2, users, stopped=stopped)
                status = process.stop() if process.process.poll() is None else process.process.wait()
                log = process.log.read_text()
            if status:
                found.faults.append(f"the server ended with status {status}")
            if "Traceback" in log or "ERROR" in log:
                found.faults.append(f"the log of the server has: {log[:2000]}")
    return found


class _Clients:
    """Those who ask one server."""

    def __init__(self, process: ServerProcess, texts: dict[str, str], found: Found, seed: int) -> None:
        self._process, self._texts, self._found, self._seed = process, texts, found, seed
        self._stopping = False
        self._kinds: dict[str, tuple[int, Callable[[random.Random], Awaitable[None]]]] = {
            "whole": (20, self._whole),
            "stream": (20, self._stream),
            "several": (5, self._several),
            "left": (12, self._left),
            "left whole": (8, self._left_whole),
            "slow reader": (4, self._slow_reader),
            "slow sender": (4, self._slow_sender),
            "cut short": (5, self._cut_short),
            "oversized": (3, self._oversized),
            "malformed": (8, self._malformed),
            "no HTTP": (3, self._no_http),
            "wrong token": (4, self._wrong_token),
            "looking": (4, self._looking),
        }

    def run(self, numbers: Iterator[int], count: int, users: int, *, stopped: bool) -> None:
        """Ask; at the end tell the server to stop while it is asked, or else wait until it has nothing to do."""
        asyncio.run(self._run(numbers, count, users, stopped=stopped))

    async def _run(self, numbers: Iterator[int], count: int, users: int, *, stopped: bool) -> None:
        warm = round(count * _WARM)
        await self._ask(itertools.islice(numbers, warm), users)
        before = await self._at_rest()
        await self._ask(itertools.islice(numbers, count - warm), users)
        after = await self._at_rest()
        self._found.memory.append([before, after])
        if before is not None and after is not None and after > _GROWTH * before:
            self._found.faults.append(f"memory grew from {before:,} bytes to {after:,} in {count - warm} requests")
        if stopped:
            await self._stopped(numbers, users)

    async def _ask(self, numbers: Iterator[int], users: int) -> None:
        async def user() -> None:
            for number in numbers:
                await self._one(number)

        await asyncio.gather(*(user() for _ in range(users)))

    async def _stopped(self, numbers: Iterator[int], users: int) -> None:
        """SIGTERM while clients ask: what the server has begun it finishes, and what comes later finds nobody."""
        asking = asyncio.ensure_future(self._ask(itertools.islice(numbers, 4 * users), users))
        await asyncio.sleep(0.3)
        self._stopping = True
        self._process.process.terminate()
        await asking
        try:
            await asyncio.to_thread(self._process.process.wait, _PATIENCE)
        except Exception as error:  # noqa: BLE001  (a server that hangs is a finding)
            self._found.faults.append(f"the server did not stop: {error}")

    async def _one(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        kind = draw.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
        self._found.kinds[kind] += 1
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._kinds[kind][1](draw)
        except FaultError as fault:
            self._found.faults.append(f"request {number}, {kind}: {fault}")
        except TimeoutError:
            self._found.faults.append(f"request {number}, {kind}: no answer in {_PATIENCE:g} s")
        except (OSError, asyncio.IncompleteReadError) as error:
            if self._stopping and not isinstance(error, _BrokenOff):
                self._found.refused += 1
            else:
                self._found.faults.append(f"request {number}, {kind}: {type(error).__name__}: {error}")

    # What is asked, by kind.

    async def _whole(self, draw: random.Random) -> None:
        prompt, length = self._pick(draw)
        body = await self._json({"prompt": prompt, "max_tokens": length})
        choice = body["choices"][0]
        _expect(choice["text"], self._texts[prompt][:length], f"the text of {prompt[:20]!r}")
        _expect(choice["finish_reason"], "length", "the reason")
        _expect(body["usage"]["completion_tokens"], length, "the tokens")

    async def _several(self, draw: random.Random) -> None:
        picked = [self._pick(draw)[0] for _ in range(draw.randint(2, 4))]
        length = draw.randint(1, _NEW_TOKENS)
        body = await self._json({"prompt": picked, "max_tokens": length})
        for prompt, choice in zip(picked, body["choices"], strict=True):
            _expect(choice["text"], self._texts[prompt][:length], f"the text of {prompt[:20]!r} among several")

    async def _stream(self, draw: random.Random) -> None:
        await self._streamed(draw)

    async def _slow_reader(self, draw: random.Random) -> None:
        await self._streamed(draw, pause=draw.uniform(0.005, 0.05))

    async def _left(self, draw: random.Random) -> None:
        await self._streamed(draw, pieces=draw.randint(0, 12))

    async def _streamed(self, draw: random.Random, *, pieces: int | None = None, pause: float = 0.0) -> None:
        """Read a stream to its end, or so many pieces of it."""
        prompt, length = self._pick(draw)
        expected, text, reason = self._texts[prompt][:length], "", None
        async with self._answered({"prompt": prompt, "max_tokens": length, "stream": True}) as answer:
            with _breaking_off():
                async for number, piece in _numbered(streamed(answer)):
                    if number == pieces:
                        break
                    text, reason = text + piece.text, piece.reason or reason
                    _expect(text, expected[: len(text)], f"the stream of {prompt[:20]!r}")
                    await asyncio.sleep(pause)
                else:
                    _expect((text, reason), (expected, "length"), f"the whole stream of {prompt[:20]!r}")

    async def _left_whole(self, draw: random.Random) -> None:
        prompt, length = self._pick(draw)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0.0, 0.1)), self._asked({"prompt": prompt, "max_tokens": length}):
                pass

    async def _slow_sender(self, draw: random.Random) -> None:
        prompt, length = self._pick(draw)
        body = json.dumps(self._greedy({"prompt": prompt, "max_tokens": length})).encode()
        for _ in self._tries():
            async with self._connected() as (reader, writer):
                writer.write(self._head(len(body)))
                for start in range(0, len(body), 40):
                    writer.write(body[start : start + 40])
                    await asyncio.sleep(draw.uniform(0.0, 0.01))
                answer = await read_answer(reader)
                if self._is_busy(answer):
                    continue
                found = json.loads(await answer.body())
            _expect(found["choices"][0]["text"], self._texts[prompt][:length], "the text of a slow sender")
            return

    async def _cut_short(self, draw: random.Random) -> None:
        """The connection ends inside the body or inside the head."""
        async with self._connected() as (_, writer):
            writer.write(self._head(1_000)[: draw.choice((None, 30, -2))] + b'{"prompt": "x", ')
            await writer.drain()
            await asyncio.sleep(draw.uniform(0.0, 0.02))

    async def _oversized(self, draw: random.Random) -> None:
        body = b'{"prompt": "' + b"x" * draw.choice((2**20, 3 * 2**20)) + b'"}'
        try:
            async with asked(self._process.address, _PATH, body, token=_TOKEN) as answer:
                self._note(answer, 413)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # closed while the body was still being sent: the answer is lost with the connection

    async def _malformed(self, draw: random.Random) -> None:
        body, status = draw.choice(_MALFORMED)
        async with asked(self._process.address, _PATH, body, token=_TOKEN) as answer:
            self._note(answer, status)
            error = json.loads(await answer.body())["error"]
            _expect(bool(error["message"]) and "\n" not in error["message"], True, "a message of one line")

    async def _no_http(self, draw: random.Random) -> None:
        async with self._connected() as (reader, writer):
            writer.write(
                draw.choice((b"\0\1\2\3\r\n\r\n", b"HELO there\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\r\n" * 40))
            )
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                writer.write_eof()
                while await reader.read(4096):
                    pass

    async def _wrong_token(self, draw: random.Random) -> None:
        token = draw.choice((None, "", "of-the-campaig", "of-the-campaign2", "\u00e9"))
        body = json.dumps({"prompt": "x"}).encode()
        async with asked(self._process.address, _PATH, body, token=token) as answer:
            self._note(answer, 401)
            await answer.body()

    async def _looking(self, draw: random.Random) -> None:
        path, status = draw.choice(
            (("/", 200), ("/health", 200), ("/metrics", 200), ("/v1/models", 200), ("/nope", 404), (_PATH, 405))
        )
        async with asked(self._process.address, path, token=_TOKEN) as answer:
            self._note(answer, *(status, 503) if path == "/health" and self._stopping else (status,))
            await answer.body()

    # How it is asked.

    def _pick(self, draw: random.Random) -> tuple[str, int]:
        return draw.choice(list(self._texts)), draw.randint(1, _NEW_TOKENS)

    def _greedy(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"temperature": 0, **fields}

    @contextlib.asynccontextmanager
    async def _asked(self, fields: dict[str, Any]) -> Any:
        body = json.dumps(self._greedy(fields)).encode()
        async with asked(self._process.address, _PATH, body, token=_TOKEN) as answer:
            yield answer

    @contextlib.asynccontextmanager
    async def _answered(self, fields: dict[str, Any]) -> Any:
        """An answer of status 200; the server is asked again as long as it is busy."""
        for _ in self._tries():
            async with self._asked(fields) as answer:
                if not self._is_busy(answer):
                    yield answer
                    return
            await asyncio.sleep(0.05)

    async def _json(self, fields: dict[str, Any]) -> dict[str, Any]:
        async with self._answered(fields) as answer:
            with _breaking_off():
                return json.loads(await answer.body())

    @contextlib.asynccontextmanager
    async def _connected(self) -> Any:
        host, port = self._process.address.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _head(self, length: int) -> bytes:
        fields = {"Host": "127.0.0.1", "Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
        fields |= {"Content-Length": str(length), "Connection": "close"}
        lines = [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([f"POST {_PATH} HTTP/1.1", *lines, "", ""]).encode()

    def _tries(self) -> Iterator[int]:
        yield from range(2_000)
        raise FaultError("the server was busy all the time")

    def _is_busy(self, answer: Answer) -> bool:
        self._note(answer, 200, 429)
        if answer.status == 429 and int(answer.headers.get("retry-after", "0")) < 1:
            raise FaultError("expected a Retry-After of at least a second beside status 429")
        return answer.status == 429

    def _note(self, answer: Answer, *allowed: int) -> None:
        self._found.statuses[answer.status] += 1
        if answer.status not in allowed:
            raise FaultError(f"expected status {' or '.join(map(str, allowed))}, found {answer.status}")

    async def _at_rest(self) -> int | None:
        """The memory of the server when it has nothing to do, which it says within a while."""
        deadline = time.monotonic() + 30
        while True:
            async with asked(self._process.address, "/metrics", token=_TOKEN) as answer:
                lines = dict(line.rsplit(" ", 1) for line in (await answer.body()).decode().splitlines())
            if lines["polysketch_requests_running"] == lines["polysketch_requests_waiting"] == "0":
                return self._process.memory
            if time.monotonic() > deadline:
                self._found.faults.append(f"slots stay in use: {lines['polysketch_requests_running']} of nobody")
                return self._process.memory
            await asyncio.sleep(0.05)


_MALFORMED: tuple[tuple[bytes, int], ...] = (
    (b"", 400),
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[" * 50_000, 400),
    (b"[]", 400),
    (b"null", 400),
    (b"{}", 400),
    (b'{"prompt": 3}', 400),
    (b'{"prompt": []}', 400),
    (b'{"prompt": [1, "x"]}', 400),
    (b'{"prompt": [1, 257]}', 400),
    (b'{"prompt": [-1]}', 400),
    (b'{"prompt": [1e400]}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "' + b"x" * 501 + b'"}', 400),
    (b'{"prompt": "x", "max_tokens": 0}', 400),
    (b'{"prompt": "x", "max_tokens": 65}', 400),
    (b'{"prompt": "x", "max_tokens": true}', 400),
    (b'{"prompt": "x", "temperature": -1}', 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", 400),
    (b'{"prompt": "x", "top_p": 0}', 400),
    (b'{"prompt": "x", "top_k": 0}', 400),
    (b'{"prompt": "x", "n": 1000}', 400),
    (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", 400),
    (b'{"prompt": "x", "stop": ""}', 400),
    (b'{"prompt": "x", "stop": [1]}', 400),
    (b'{"prompt": "x", "stream": 1}', 400),
    (b'{"prompt": "x", "stream_options": {"nope": 1}}', 400),
    (b'{"prompt": "x", "logprobs": 3}', 400),
    (b'{"prompt": "x", "model": "other"}', 404),
    (b'{"messages": [{"role": "user", "content": "x"}]}', 400),
)
"""Bodies that are no request, and the status that each gets."""


class _BrokenOff(OSError):
    """An answer that had begun and did not end."""


@contextlib.contextmanager
def _breaking_off() -> Iterator[None]:
    try:
        yield
    except (OSError, asyncio.IncompleteReadError) as error:
        raise _BrokenOff(f"an answer broke off: {type(error).__name__}: {error}") from error


async def _numbered(pieces: Any) -> Any:
    number = 0
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            yield number, piece
            number += 1


def _expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise FaultError(f"expected {what} to be {expected!r}, found {found!r}")


def _model(seed: int) -> TransformerLM:
    """Sharp, so that a wrong state shows; sums, a ring of tokens, and keys and values of all tokens."""
    torch.manual_seed(seed)
    mechanisms = {"attention": ("polysketch", "softmax"), "attention_options": ({"window": 8}, {})}
    model = TransformerLM(ModelConfig(257, 2, 64, 2, projection_convolution=2, **mechanisms))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.1 * torch.randn_like(parameter))
    return never_ending(model.eval())


def _expected(model: TransformerLM, seed: int) -> dict[str, str]:
    """The greedy text of each prompt; some begin as others do."""
    draw, tokenizer = random.Random(seed), BytesTokenizer()
    beginning = "".join(draw.choices("abcdefgh ", k=_LONGEST))
    prompts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 80))) for _ in range(12)]
    prompts += [beginning[: draw.randint(60, _LONGEST - 20)] + draw.choice("abc") * 5 for _ in range(12)]
    made = [generate(model, [tokenizer.encode(each)], max_new_tokens=_NEW_TOKENS, temperature=0) for each in prompts]
    return {each: tokenizer.decode(found.tokens[0]) for each, found in zip(prompts, made, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
