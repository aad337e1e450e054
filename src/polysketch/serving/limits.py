"""What a server gives to one request, and to all of them."""

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds.

    Attributes:
        prompt_tokens: of one prompt.
        new_tokens: of one continuation.
        queue: requests that wait beside those in slots; further ones are told to come again.
        body_bytes: of one HTTP request.
        stop_strings: of one request.
    """

    prompt_tokens: int = 1_000_000
    new_tokens: int = 4096
    queue: int = 64
    body_bytes: int = 16 * 2**20
    stop_strings: int = 16

    def __post_init__(self) -> None:
        """Refuse bounds that admit nothing."""
        for name in ("prompt_tokens", "new_tokens", "body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, found {getattr(self, name)}")
        if self.queue < 0:
            raise ValueError(f"expected a queue of at least 0 requests, found {self.queue}")
