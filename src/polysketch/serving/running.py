"""A server from its first line to its last: sockets, signals, and what is told at the start."""

import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from polysketch.serving.guards import LOOPBACK

__all__ = ["address_at", "address_of", "how_to_ask", "is_local", "listen", "run_app", "server_of"]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: name or address.
        port: 0 for any that is free.

    Raises:
        OSError: the address is taken, or none of this machine's, with the address in it.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen ({error.strerror})", f"{host}:{port}") from None


def address_of(listening: socket.socket) -> str:
    """The address for browsers and clients."""
    host, port = listening.getsockname()[:2]
    return address_at(host, port)


def address_at(host: str, port: int) -> str:
    """The same of a server that listens, or will listen, there; that of this machine for all addresses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def how_to_ask(address: str, *, token: bool) -> str:
    """A line for a shell."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 60})
    authorization = '-H "Authorization: Bearer $POLYSKETCH_TOKEN" ' if token else ""
    return f"curl {address}/v1/completions {authorization}-H 'Content-Type: application/json' -d '{body}'"


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    return host in LOOPBACK


def server_of(app: Starlette, *, grace: float, ready: Callable[[], None]) -> uvicorn.Server:
    """The server of an application; arguments as for `run_app`."""
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace)),
        ws="none",
    )
    return _Server(config, ready)


def run_app(app: Starlette, listening: socket.socket, *, grace: float, ready: Callable[[], None]) -> None:
    """Serve until a signal says stop; then take no more requests, and finish those that run.

    Args:
        app: of `build_app`.
        listening: from `listen`.
        grace: seconds for what runs; what is not done by then is cut off. A second Ctrl+C does not wait.
        ready: called when requests are answered.
    """
    with _signals_that_end_well():
        server_of(app, grace=grace, ready=ready).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As there, then tell."""
        await super().startup(sockets)
        self._ready()


@contextmanager
def _signals_that_end_well() -> Iterator[None]:
    """The server raises the signal that stopped it once more when it is done: by then that is no failure."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
