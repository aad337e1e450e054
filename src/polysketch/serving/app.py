"""The routes: OpenAI's interface, health, figures, and the page."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from polysketch.generation import Request, TextStream
from polysketch.generation.randomness import earlier_equals
from polysketch.serving.answers import Answer, ChatAnswer, CompletionAnswer, Usage
from polysketch.serving.asked import Asked, asked_chat, asked_completion
from polysketch.serving.errors import ApiError
from polysketch.serving.guards import BearerGuard, OriginGuard, error_response
from polysketch.serving.limits import Limits
from polysketch.serving.metrics import exposition
from polysketch.serving.served_model import ServedModel
from polysketch.serving.worker import Call, Worker

__all__ = ["build_app"]

_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)
"""The page asks nobody but this server."""


def build_app(
    served: ServedModel, worker: Worker, limits: Limits, *, token: str | None = None, local: bool = True
) -> Starlette:
    """The application, which starts the worker and stops it.

    Args:
        served: model, tokenizer, name.
        worker: with an engine of this model, not started.
        limits: of requests.
        token: that clients must send; None for none.
        local: whether the server is for this machine alone, so that other sites' pages are refused.
    """
    guards = [Middleware(OriginGuard)] if local else []
    guards += [Middleware(BearerGuard, token=token)] if token is not None else []

    @contextlib.asynccontextmanager
    async def alive(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    routes = _Routes(served, worker, limits)
    return Starlette(
        routes=[
            Route("/", routes.page),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
        ],
        middleware=guards,
        exception_handlers={ApiError: _explained, HTTPException: _refused, ClientDisconnect: _gone, 500: _failed},
        lifespan=alive,
    )


class _Routes:
    """What is answered to each request."""

    def __init__(self, served: ServedModel, worker: Worker, limits: Limits) -> None:
        self._served = served
        self._worker = worker
        self._limits = limits
        figures = {name: values for name, _, _, values in worker.series()}
        self._state_bytes = {name: int(figures[name][0][1]) for name in ("state_bytes", "state_bytes_per_token")}

    async def page(self, request: HttpRequest) -> Response:
        """The page to chat on."""
        return HTMLResponse(_page(), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: HttpRequest) -> Response:
        """Whether requests are served."""
        alive = self._worker.is_alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    async def metrics(self, request: HttpRequest) -> Response:
        """Figures for a monitor."""
        return PlainTextResponse(exposition(self._worker.series()), media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: HttpRequest) -> Response:
        """The one model by its name."""
        if request.path_params["name"] != self._served.name:
            message = f"expected the model {self._served.name!r}, found {request.path_params['name']!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model_card())

    async def completions(self, request: HttpRequest) -> Response:
        """Continue prompts."""
        return await self._answer(request, asked_completion, CompletionAnswer(self._served.name))

    async def chat_completions(self, request: HttpRequest) -> Response:
        """Answer in a chat."""
        return await self._answer(request, asked_chat, ChatAnswer(self._served.name))

    async def _answer(self, request: HttpRequest, read: Callable[..., Asked], answer: Answer) -> Response:
        asked = read(await _json_of(request, self._limits.body_bytes), self._served.name, self._limits)
        self._worker.require_served(len(asked.prompts) * asked.samples)
        prompts = await asyncio.to_thread(lambda: [self._served.prompt(each) for each in asked.prompts])
        call = self._worker.submit(self._requests(asked, prompts))
        usage = Usage(sum(map(len, prompts)))
        if asked.stream:
            events = _events(call, asked, answer, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=_UNCACHED)
        return await _unless_left(request, _whole(call, asked, answer, usage))

    def _requests(self, asked: Asked, prompts: list[list[int]]) -> list[tuple[Request, TextStream]]:
        """One for every continuation, samples of a prompt side by side; equal prompts get different samples."""
        most = self._limits.prompt_tokens
        for prompt in prompts:
            if len(prompt) > most:
                message = f"expected prompts of at most {most} tokens, found {len(prompt)}"
                raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        ends, decode = self._served.ends, self._served.tokenizer.known_bytes
        rows = [prompt for prompt in prompts for _ in range(asked.samples)]
        return [
            (Request(prompt, asked.new_tokens, asked.sampler, seed, sample, ends), TextStream(decode, asked.stop))
            for prompt, sample in zip(rows, earlier_equals(rows), strict=True)
        ]

    def _model_card(self) -> dict[str, Any]:
        """What OpenAI's interface has, and what only models like these have to say."""
        return {
            "id": self._served.name,
            "object": "model",
            "created": 0,
            "owned_by": "polysketch",
            "chat": self._served.render is not None,
            **self._state_bytes,
            "key_value_bytes_per_token": self._served.key_value_bytes,
            "most_new_tokens": self._limits.new_tokens,
        }


_CLIENT_LEFT = 499
"""For logs, as other servers note it."""

_UNCACHED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Pieces are for now, and proxies are not to hold them back."""


async def _whole(call: Call, asked: Asked, answer: Answer, usage: Usage) -> Response:
    count = len(asked.prompts) * asked.samples
    texts, reasons = [""] * count, [""] * count
    async with contextlib.aclosing(call.pieces()) as pieces:
        async for index, text, event in pieces:
            if event.finish == "error":
                raise ApiError(500, event.error or "failed")
            _count(usage, index // asked.samples, event)
            texts[index] += text
            reasons[index] = event.finish or ""
    return JSONResponse(answer.whole(texts, reasons, usage))


async def _events(call: Call, asked: Asked, answer: Answer, usage: Usage) -> AsyncIterator[str]:
    """Server-sent events."""
    for body in answer.begin(len(asked.prompts) * asked.samples):
        yield _event(body)
    async with contextlib.aclosing(call.pieces()) as pieces:
        async for index, text, event in pieces:
            if event.finish == "error":
                yield _event(ApiError(500, event.error or "failed").body)
                return
            _count(usage, index // asked.samples, event)
            if text or event.finish is not None or asked.with_running_usage:
                yield _event(answer.piece(index, text, event.finish, usage if asked.with_running_usage else None))
    if asked.with_usage:
        yield _event(answer.usage(usage))
    yield "data: [DONE]\n\n"


def _count(usage: Usage, prompt: int, event: Any) -> None:
    usage.new += event.token is not None
    usage.reused_of[prompt] = max(usage.reused_of.get(prompt, 0), event.reused)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _unless_left(request: HttpRequest, work: Any) -> Response:
    """The answer, unless the client leaves before it is ready: then what computes it is cancelled."""
    answering = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return Response(status_code=_CLIENT_LEFT)
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _left(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json_of(request: HttpRequest, most: int) -> Any:
    """The body, which is not read further than the limit."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected the header Content-Type: application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise ApiError(413, f"expected a body of at most {most} bytes, found more")
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"expected JSON, found something else: {error}") from None


@cache
def _page() -> str:
    return resources.files("polysketch.serving").joinpath("page.html").read_text(encoding="utf-8")


async def _explained(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _refused(request: HttpRequest, error: Exception) -> Response:
    """What the framework refuses: an unknown address, another method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _gone(request: HttpRequest, error: Exception) -> Response:
    """Nobody hears this."""
    return Response(status_code=_CLIENT_LEFT)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(500, f"{type(error).__name__}: see the log of the server"))
