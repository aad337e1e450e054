"""Who may ask: a bearer token, and the names by which this machine is meant."""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from polysketch.serving.errors import ApiError

__all__ = ["LOOPBACK", "BearerGuard", "OriginGuard", "error_response"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""

_OPEN = ("/", "/health")
"""What anybody may see: the page, and whether the server lives."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class BearerGuard:
    """Lets requests with the token through, and to the page and /health all; compares in constant time."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._expected = token.encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """As applications of ASGI."""
        if scope["type"] == "http" and scope["path"] not in _OPEN and not self._knows(scope):
            message = "expected the header Authorization: Bearer TOKEN, with the token of this server"
            refused = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error_response(refused)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, found = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(found, self._expected)


class OriginGuard:
    """On a server for this machine alone, refuses what another site's page sends by a browser on this machine.

    Such a request names another host (a name that was made to mean 127.0.0.1) or another origin.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """As applications of ASGI."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            hosts = [headers.get("host", ""), *map(_without_scheme, headers.getlist("origin"))]
            if any(_host(each) not in LOOPBACK for each in hosts):
                message = f"expected a request to this machine by its own name ({', '.join(LOOPBACK)}), found another"
                await error_response(ApiError(403, message))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def error_response(error: ApiError) -> JSONResponse:
    """The answer that says what is wrong."""
    return JSONResponse(error.body, error.status, error.headers)


def _host(address: str) -> str:
    """Without the port, and without the brackets of IPv6."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0].lower()


def _without_scheme(origin: str) -> str:
    return origin.partition("://")[2]
