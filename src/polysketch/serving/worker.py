"""The thread that computes: takes requests from an event loop, and gives pieces of text back to it."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from polysketch.generation import Engine, Event, Request, TextStream
from polysketch.serving.errors import ApiError
from polysketch.serving.metrics import Metrics, Series

__all__ = ["Call", "Piece", "Worker"]

_LOG = logging.getLogger(__name__)

_LONGEST_WAIT = 60
"""Seconds that a client is told to wait at most."""


class Piece(NamedTuple):
    """What came of one of a call's requests.

    Attributes:
        which: of them, from 0.
        text: new text; "" where a token has no certain text yet.
        event: of the engine.
    """

    which: int
    text: str
    event: Event


@dataclass
class _Job:
    """A request of a call, on its way through the engine."""

    call: "Call"
    index: int
    request: Request
    text: TextStream
    asked_at: float
    ticket: int | None = None
    heard: bool = False


class Call:
    """Requests that one client waits for; made by `Worker.submit`."""

    def __init__(self, jobs: int, cancel: Callable[["Call"], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._left = jobs
        self._cancel = cancel

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What comes, as it comes, until all requests have ended. Leaving early cancels the others."""
        try:
            while self._left:
                piece = await self._pieces.get()
                self._left -= piece.event.finish is not None
                yield piece
        finally:
            if self._left:
                self._cancel(self)

    def deliver(self, piece: Piece) -> None:
        """Hand a piece over, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


class Worker:
    """Runs an engine in a thread of its own, as long as there is something to do.

    Args:
        engine: nobody else's from now on.
        queue: requests that may wait beside those in slots.

    Attributes:
        metrics: what was counted.
    """

    def __init__(self, engine: Engine, queue: int) -> None:
        self.metrics = Metrics()
        self._engine = engine
        self._most = engine.slots.count + queue
        self._changed = threading.Condition()
        self._new: deque[_Job] = deque()
        self._cancelled: deque[Call] = deque()
        self._jobs: dict[int, _Job] = {}  # by ticket; of the thread alone
        self._open = 0  # requests of calls that have not ended
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="polysketch-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs; requests that are not done fail."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._stopping

    @property
    def is_idle(self) -> bool:
        """Whether every request that was submitted has ended."""
        return self._open == 0

    def require_served(self, count: int) -> None:
        """Refuse a call of more continuations than are ever served at once, before anything is made for each of them.

        Raises:
            ApiError: 400.
        """
        if count > self._most:
            raise ApiError(400, f"expected at most {self._most} continuations in a request, found {count}")

    def submit(self, requests: Sequence[tuple[Request, TextStream]]) -> Call:
        """Queue the requests of one client, all of them or none; from the event loop that reads the call.

        Raises:
            ApiError: 400 for what the engine refuses or more requests than are ever served at once, 429 where too many
                wait.
        """
        self.require_served(len(requests))
        for request, _ in requests:
            try:
                self._engine.check(request)
            except ValueError as error:
                raise ApiError(400, str(error)) from None
        call, now = Call(len(requests), self._cancel), time.monotonic()
        with self._changed:
            if self._open + len(requests) > self._most:
                self.metrics.refused += len(requests)
                raise self._busy()
            self._open += len(requests)
            for index, (request, text) in enumerate(requests):
                heard = replace(request, until=text.add)
                self._new.append(_Job(call, index, heard, text, now))
            self._changed.notify()
        return call

    def series(self) -> list[Series]:
        """What was counted, and how things stand."""
        engine = self._engine
        waiting = max(0, self._open - engine.num_running)
        gauges = (
            ("requests_running", "requests whose prompt is read, or that are continued", engine.num_running),
            ("requests_waiting", "requests of whose prompt nothing is read", waiting),
            ("slots", "requests that are continued at the same time at most", engine.slots.count),
            ("state_bytes", "bytes of the state of one request, whatever its length", engine.slots.fixed_bytes),
            (
                "state_bytes_per_token",
                "bytes of a request beside these, for each token",
                engine.slots.token_bytes,
            ),
            ("slot_bytes", "bytes of the states of all slots, used or not", engine.slots.nbytes),
            ("snapshots", "states after beginnings of prompts that are kept", len(engine.snapshots)),
            ("snapshot_bytes", "bytes of these", engine.snapshots.nbytes),
        )
        return [*self.metrics.series(), *((name, "gauge", text, [("", float(v))]) for name, text, v in gauges)]

    def _busy(self) -> ApiError:
        seconds = min(max(1, math.ceil(self.metrics.request.mean)), _LONGEST_WAIT)
        message = f"all {self._engine.slots.count} slots are in use and the queue is full: come again in {seconds} s"
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})

    def _cancel(self, call: Call) -> None:
        with self._changed:
            self._cancelled.append(call)
            self._changed.notify()

    def _run(self) -> None:
        while self._take_orders():
            try:
                events = self._engine.step()
            except Exception as error:  # noqa: BLE001  (whatever it is, clients are told, and the thread goes on)
                _LOG.exception("a step failed; all requests are told so")
                events = self._engine.abandon(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
            for event in events:
                self._tell(event)
        for event in self._engine.abandon("the server stops"):
            self._tell(event)

    def _take_orders(self) -> bool:
        """Wait until there is something to do; False where the thread is to end."""
        with self._changed:
            while not (self._new or self._cancelled or self._stopping or not self._engine.is_idle):
                self._changed.wait()
            new, cancelled = list(self._new), set(self._cancelled)
            self._new.clear()
            self._cancelled.clear()
        for job in new:
            if job.call in cancelled:
                self._close("cancelled", job)
            else:
                job.ticket = self._engine.add(job.request)
                self._jobs[job.ticket] = job
        for ticket in [ticket for ticket, job in self._jobs.items() if job.call in cancelled]:
            self._engine.cancel(ticket)
            self._close("cancelled", self._jobs.pop(ticket))
        return not self._stopping

    def _tell(self, event: Event) -> None:
        job = self._jobs[event.ticket]
        self._count(job, event)
        text = job.text.take() if event.finish is None else job.text.finish()
        if event.finish is not None:
            del self._jobs[event.ticket]
            self._close(event.finish, job)
        job.call.deliver(Piece(job.index, text, event))

    def _count(self, job: _Job, event: Event) -> None:
        self.metrics.new_tokens += event.token is not None
        if not job.heard and event.finish != "error":
            job.heard = True
            self.metrics.prompt_tokens += len(job.request.prompt)
            self.metrics.reused_tokens += event.reused
            self.metrics.first_token.observe(time.monotonic() - job.asked_at)

    def _close(self, reason: str, job: _Job) -> None:
        self.metrics.finished[reason] += 1
        if reason != "cancelled":
            self.metrics.request.observe(time.monotonic() - job.asked_at)
        with self._changed:
            self._open -= 1
