"""A client of HTTP that costs little, so that what is measured is the server: it runs on the same cores."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "Piece", "asked", "read_answer", "read_json", "streamed"]

_LONGEST_LINE = 2**20


@dataclass(frozen=True)
class Answer:
    """The beginning of an answer, and its body to be read.

    Attributes:
        status: of HTTP.
        headers: by their names in small letters.
        reader: where the body comes from.
    """

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, as it comes.

        Raises:
            asyncio.IncompleteReadError, ValueError: the connection ended early, or what came is not HTTP.
        """
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            yield await self.reader.readexactly(int(self.headers.get("content-length", "0")))
            return
        while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await self.reader.readexactly(size + 2))[:-2]

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.parts()])


@dataclass(frozen=True)
class Piece:
    """An event of a stream.

    Attributes:
        text: new text of the first choice.
        tokens: made so far, where the server says so; None otherwise.
        reason: why the text ended; None while it goes on.
    """

    text: str
    tokens: int | None
    reason: str | None


@contextlib.asynccontextmanager
async def asked(
    address: str, path: str, body: bytes | None = None, *, token: str | None = None, headers: Mapping[str, str] = {}
) -> AsyncIterator[Answer]:
    """Send a request on a connection of its own, which is closed at the end.

    Args:
        address: http://HOST:PORT.
        path: that is asked for.
        body: JSON to POST; None for a GET.
        token: to send as bearer token.
        headers: to send beside the usual ones, or in their place.

    Raises:
        OSError, asyncio.IncompleteReadError: no connection, or none that lasted.
    """
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=_LONGEST_LINE)
    try:
        writer.write(_head(parts.netloc, path, body, token, headers) + (body or b""))
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read everything
            await writer.drain()
        yield await read_answer(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_json(address: str, path: str, token: str | None = None) -> Any:
    """What a GET gives.

    Raises:
        OSError: another status than 200, or no connection.
    """
    async with asked(address, path, token=token) as answer:
        body = await answer.body()
    if answer.status != 200:
        raise OSError(f"expected status 200 of {address}{path}, found {answer.status}: {body[:200]!r}")
    return json.loads(body)


async def streamed(answer: Answer) -> AsyncIterator[Piece]:
    """The events of a stream of completions, the last one left out, which says that it is done.

    Raises:
        OSError: the server sent an error, or ended the stream without saying so.
    """
    held = b""
    async for part in answer.parts():
        *events, held = (held + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield _piece(json.loads(data))
    raise OSError("expected a stream that says it is done, found its end")


def _piece(body: dict[str, Any]) -> Piece:
    if "error" in body:
        raise OSError(f"the server failed: {body['error'].get('message')}")
    choice = body["choices"][0] if body["choices"] else {}
    usage = body.get("usage") or {}
    return Piece(choice.get("text", ""), usage.get("completion_tokens"), choice.get("finish_reason"))


def _head(host: str, path: str, body: bytes | None, token: str | None, headers: Mapping[str, str]) -> bytes:
    fields = {"Host": host, "Connection": "close"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    if token is not None:
        fields["Authorization"] = f"Bearer {token}"
    lines = [f"{name}: {value}" for name, value in {**fields, **headers}.items()]
    return "\r\n".join([f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", *lines, "", ""]).encode()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The beginning of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in head[1:] if line)
    return Answer(int(head[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields}, reader)
