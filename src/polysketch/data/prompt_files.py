"""Many prompts from a file, their continuations into another, a batch at a time; a killed one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polysketch.storage import disk, strict_json
from polysketch.storage.outside import decoded


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file: a line of JSON each, a string or an object with a field `prompt`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is neither, or there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a file of prompts, found nothing at {path}")
    lines = path.read_bytes().splitlines()
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"expected a prompt on each line of {path}, found none")
    return prompts


def _prompt(line: bytes, place: str) -> str:
    try:
        found = decoded(line, place)
    except ValueError as error:
        raise ValueError(f'expected a string of JSON or {{"prompt": ...}} at {place}, found other text') from error
    prompt = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(prompt, str):
        raise ValueError(f'expected a string of JSON or {{"prompt": ...}} at {place}, found {type(found).__name__}')
    return prompt


class Continuations:
    """The file of continuations: a line of JSON for each prompt, in their order.

    Args:
        path: of the file; it may hold the beginning of the same work.
        prompts: all of them.
        settings: what a continuation depends on besides; JSON values.
        batch_size: prompts that are continued together, and written together.

    Attributes:
        done: how many prompts are continued, and written.

    Raises:
        ValueError: the file holds other prompts, or continuations by other settings.
    """

    def __init__(self, path: Path, prompts: Sequence[str], settings: Mapping[str, Any], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"expected --batch-size of at least 1, found {batch_size}")
        self._path, self._prompts, self._batch_size = path, prompts, batch_size
        described = json.dumps({**settings, "batch_size": batch_size}, sort_keys=True, default=str)
        self._settings = hashlib.sha256(described.encode()).hexdigest()[:16]
        self.done = self._kept()

    def make(
        self, continued: Callable[[Sequence[str]], Sequence[Mapping[str, Any]]], tell: Callable[[int], None]
    ) -> None:
        """Continue what is missing.

        Args:
            continued: gives for a batch of prompts what is to be written of each.
            tell: gets, after each batch, how many prompts are done in all.
        """
        for begin in range(self.done, len(self._prompts), self._batch_size):
            batch = self._prompts[begin : begin + self._batch_size]
            found = zip(batch, continued(batch), strict=True)
            lines = [
                strict_json.encoded({"prompt": prompt, **values, "settings": self._settings})
                for prompt, values in found
            ]
            disk.append(self._path, b"".join(lines))
            self.done = begin + len(batch)
            tell(self.done)

    def _kept(self) -> int:
        """How many are done; a batch that was written in part is dropped."""
        if not self._path.exists():
            return 0
        *lines, torn = self._path.read_bytes().split(b"\n")
        for number, (line, prompt) in enumerate(zip(lines, [*self._prompts, None], strict=False), start=1):
            self._require_same(line, prompt, f"{self._path}:{number}")
        if len(lines) + bool(torn) > len(self._prompts):
            raise ValueError(f"expected at most {len(self._prompts)} lines in {self._path}, found more")
        if torn and len(lines) < len(self._prompts):
            self._require_torn(torn, self._prompts[len(lines)])
        whole = len(lines) if len(lines) == len(self._prompts) else len(lines) // self._batch_size * self._batch_size
        disk.replace_file(self._path, b"".join(line + b"\n" for line in lines[:whole]))
        return whole

    def _require_torn(self, torn: bytes, prompt: str) -> None:
        """Refuse a last line without its end that does not begin as ours: it is not for us to drop."""
        begins = strict_json.encoded({"prompt": prompt}).rstrip(b"}\n")
        if not (torn.startswith(begins) or begins.startswith(torn)):
            raise ValueError(
                f"expected the beginning of a continuation at the end of {self._path}, found other text: nothing was "
                "changed; give another --out"
            )

    def _require_same(self, line: bytes, prompt: str | None, place: str) -> None:
        try:
            found = decoded(line, place)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("prompt") != prompt or found.get("settings") != self._settings:
            raise ValueError(
                f"expected the continuation of the same prompt by the same settings at {place}, found another: "
                "give the same command to go on, or another --out"
            )
