"""What a client is told when it does not get what it asked for, in the form of OpenAI's interface."""

from typing import Any

__all__ = ["ApiError"]

_LONGEST_MESSAGE = 500
"""Letters. What was found may be a number of thousands of digits, out of a client's request."""


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: of HTTP.
        message: one line: what was expected, and what was found. Of a long one the middle is left out.
        param: the field of the request that it is about.
        code: a word for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(_shortened(message))
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _shortened(message: str) -> str:
    """Both ends, which say what was expected and what to do."""
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}"
