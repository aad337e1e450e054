"""A server under load, over HTTP: what many users cost each other, in time and in memory.

Users are clients that send a request, read its answer as it comes, and send the next one. Prompts of a cell begin with
the same tokens, which the server reads once and keeps (a snapshot), and end with tokens of their own: so many users
stand at a long position without the time to read as many long prompts. What it takes to read one is measured apart.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polysketch.benchmarking.environment import environment, load
from polysketch.benchmarking.http_client import asked, read_json, streamed
from polysketch.benchmarking.models import build_model
from polysketch.benchmarking.server_process import ServerProcess, never_ending, serving, write_run
from polysketch.benchmarking.settings import ServingSettings
from polysketch.benchmarking.way_names import Sizes

__all__ = ["measure_serving"]

_OWN = 4  # tokens at the end of a prompt that only this request has
_MEGABYTE = 2**20
_SPARE = 64 * _MEGABYTE  # of the memory for states, beside what is counted
_SMALLEST_CHUNK = 32  # tokens of a prompt that a server may read between two steps
_BYTES = 256  # ids of a prompt are below

Progress = Callable[[str], None]


def measure_serving(settings: ServingSettings, threads: int | None, progress: Progress) -> dict[str, Any]:
    """Measure and describe; JSON values.

    Args:
        settings: what to measure.
        threads: that the server computes with; PyTorch's choice where None.
        progress: called with a line before every step.

    Returns:
        A record. `load` has a cell for each mechanism, number of users and prompt length; `reading`, for each length,
        the wait for the first token of a new prompt, and of the next turn of the same conversation; `beside`, the time
        between tokens of the others while a long prompt is read.

    Raises:
        RuntimeError: a server that does not start.
        OSError: a server that cannot be reached, or fails.
    """
    started, before = time.monotonic(), load()
    found: dict[str, Any] = {"load": [], "reading": [], "beside": []}
    if settings.url is not None:
        _measure_url(settings, found, progress)
    else:
        for name in settings.mechanisms:
            _measure_mechanism(name, settings, threads, found, progress)
    return {
        "benchmark": "serving",
        "environment": environment(torch.device("cpu")),
        "dtype": "float32",
        "server_threads": threads,
        "settings": {**dataclasses.asdict(settings), "token": None},
        **found,
        "load_before": before,
        "load_after": load(),
        "seconds": time.monotonic() - started,
    }


def _measure_url(settings: ServingSettings, found: dict[str, Any], progress: Progress) -> None:
    assert settings.url is not None
    address = settings.url.rstrip("/").removesuffix("/v1")
    site = _Site(address, None, settings.token)
    name = asyncio.run(site.card())["id"]
    for users in settings.users:
        _load_cells(name, users, site, settings, found["load"], progress)
    _reading_cells(name, site, settings, found["reading"], progress)
    _beside(name, site, settings, found["beside"], progress)


def _measure_mechanism(
    name: str, settings: ServingSettings, threads: int | None, found: dict[str, Any], progress: Progress
) -> None:
    """A server of its own for each number of users: it makes room for as many."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model"
        model = never_ending(build_model(name, settings.preset, Sizes()))
        write_run(run, model)
        del model
        card = None
        for users in settings.users:
            progress(f"{name}: a server for {users} users")
            with _server(run, users, settings, threads, card) as process:
                site = _Site(process.address, process, None)
                card = asyncio.run(site.card())
                _load_cells(name, users, site, settings, found["load"], progress)
        assert card is not None
        with _server(run, settings.beside + 1, settings, threads, card) as process:
            site = _Site(process.address, process, None)
            _reading_cells(name, site, settings, found["reading"], progress)
            _beside(name, site, settings, found["beside"], progress)


@contextlib.contextmanager
def _server(run: Path, users: int, settings: ServingSettings, threads: int | None, card: dict[str, Any] | None) -> Any:
    """With room for so many, and snapshots of two of the longest."""
    longest = settings.longest + settings.new_tokens + _OWN
    one = _bytes_of(card, longest) if card else settings.memory * _MEGABYTE // max(users, 1)
    kept = 2 * one + _SPARE
    flags = {
        "--concurrent": users,
        "--queue": 2 * users,
        "--state-memory": max(1, (users * one + _SPARE) // _MEGABYTE),
        "--snapshot-memory": max(1, kept // _MEGABYTE),
        "--chunk": settings.chunk,
        "--max-new-tokens": longest,
    }
    words = [str(word) for pair in flags.items() if pair[1] is not None for word in pair]
    with serving(run, *words, threads=threads) as process:
        yield process


@dataclasses.dataclass(frozen=True)
class _Site:
    """Where to ask."""

    address: str
    process: ServerProcess | None
    token: str | None

    async def card(self) -> dict[str, Any]:
        """What it says about its model."""
        return (await read_json(self.address, "/v1/models", self.token))["data"][0]

    async def ask(
        self, prompt: Sequence[int], new_tokens: int, on_token: Callable[[], Any] | None = None
    ) -> list[float]:
        """When it was asked, and when each token came."""
        body = {
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        times = [time.perf_counter()]
        async with asked(self.address, "/v1/completions", json.dumps(body).encode(), token=self.token) as answer:
            if answer.status != 200:
                raise OSError(f"expected status 200, found {answer.status}: {(await answer.body())[:300]!r}")
            async for piece in streamed(answer):
                if piece.tokens is not None and piece.tokens >= len(times):
                    times += [time.perf_counter()] * (piece.tokens + 1 - len(times))
                    if on_token is not None:
                        on_token()
        return times


def _load_cells(
    name: str, users: int, site: _Site, settings: ServingSettings, cells: list[dict[str, Any]], progress: Progress
) -> None:
    card = asyncio.run(site.card())
    for length in settings.prompt_lengths:
        states = users * _bytes_of(card, length + settings.new_tokens) if "state_bytes" in card else None
        cell: dict[str, Any] = {"series": name, "users": users, "prompt": length, "state_bytes": states}
        cells.append(cell)
        if states is not None and states > settings.memory * _MEGABYTE:
            cell["left_out"] = f"states of {states:,} bytes are more than --memory"
            continue
        progress(f"{name}: {users} users, prompts of {length}")
        cell |= asyncio.run(_loaded(site, users, length, settings))


async def _loaded(site: _Site, users: int, length: int, settings: ServingSettings) -> dict[str, Any]:
    """What so many users see, and what they cost."""
    beginning = _tokens(length - _OWN, seed=length)
    await site.ask(beginning, 1)  # where a request ends, the server keeps the state: here that after the beginning
    if site.process is not None:
        site.process.forget_most_memory()
    cpu, begun = _cpu(site), time.perf_counter()

    async def user(number: int) -> list[list[float]]:
        answers = []
        for turn in range(settings.requests):
            own = _tokens(_OWN, seed=2 + number * settings.requests + turn)
            answers.append(await site.ask([*beginning, *own], settings.new_tokens))
        return answers

    answers = [one for found in await asyncio.gather(*map(user, range(users))) for one in found]
    seconds, tokens = time.perf_counter() - begun, sum(len(times) - 1 for times in answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": None if cpu is None else tokens / max((_cpu(site) or 0) - cpu, 1e-9),
        "first_token": _spread([times[1] - times[0] for times in answers]),
        "between_tokens": _spread([gap for times in answers for gap in _gaps(times)]),
        "server_bytes": site.process and site.process.most_memory,
    }


def _reading_cells(
    name: str, site: _Site, settings: ServingSettings, cells: list[dict[str, Any]], progress: Progress
) -> None:
    """One user: a new prompt, then the prompt, its answer and a few tokens more."""
    for length in settings.prompt_lengths:
        progress(f"{name}: a prompt of {length} read")
        cells.append({"series": name, "prompt": length, **asyncio.run(_read(site, length, settings))})


async def _read(site: _Site, length: int, settings: ServingSettings) -> dict[str, Any]:
    first, then = [], []
    for number in range(settings.requests):
        prompt = _tokens(length, seed=-1 - number - length * settings.requests)
        asked_at, came_at, *_ = await site.ask(prompt, 2)
        first.append(came_at - asked_at)
        asked_at, came_at, *_ = await site.ask([*prompt, *_tokens(2 * _OWN, seed=1)], 2)
        then.append(came_at - asked_at)
    return {"first_token": _spread(first), "first_token_of_next_turn": _spread(then)}


def _beside(name: str, site: _Site, settings: ServingSettings, cells: list[dict[str, Any]], progress: Progress) -> None:
    progress(f"{name}: {settings.beside} users beside a prompt of {settings.longest}")
    cells.append(
        {
            "series": name,
            "users": settings.beside,
            "prompt": settings.longest,
            **asyncio.run(_read_beside(site, settings)),
        }
    )


async def _read_beside(site: _Site, settings: ServingSettings) -> dict[str, Any]:
    """The time between tokens of users, alone and while a prompt is read, and the seconds of the processor for it."""
    enough = 4 * settings.new_tokens + settings.longest // _SMALLEST_CHUNK
    users = _Users(site, settings.beside, enough)
    try:
        await users.have_made(2 * settings.beside)
        alone = await users.during(users.have_made(settings.new_tokens * settings.beside))
        reading = await users.during(site.ask(_tokens(settings.longest, seed=-10_000), 1))
    finally:
        await users.leave()
    steps = (alone["cpu_seconds_of_a_step"], reading["cpu_seconds_of_a_step"])
    gaps = (alone["between_tokens"], reading["between_tokens"])
    return {
        "alone": alone,
        "while_reading": reading,
        "ratio": None if None in gaps else gaps[1]["mean"] / gaps[0]["mean"],
        # The processor's time is counted in hundredths of a second: that of a few steps may be none.
        "cpu_ratio": steps[1] / steps[0] if steps[0] and steps[1] is not None else None,
    }


class _Users:
    """Users with long answers, until they leave."""

    def __init__(self, site: _Site, count: int, new_tokens: int) -> None:
        self._site = site
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._asking = [
            asyncio.ensure_future(site.ask(_tokens(_OWN, seed=2 + number), new_tokens, self._listener(number)))
            for number in range(count)
        ]

    @property
    def made(self) -> int:
        """Tokens of all so far."""
        return sum(map(len, self._times))

    async def have_made(self, tokens: int) -> None:
        """Wait for so many more.

        Raises:
            OSError: an answer ended.
        """
        enough = self.made + tokens
        while self.made < enough:
            for each in self._asking:
                if each.done():
                    each.result()
                    raise OSError("expected answers that go on, found the end of one")
            await asyncio.sleep(0.01)

    async def during(self, work: Awaitable[Any]) -> dict[str, Any]:
        """What users saw while something was done."""
        begun, cpu, before = time.perf_counter(), _cpu(self._site), self.made
        await work
        ended, steps = time.perf_counter(), max(self.made - before, 1) / len(self._times)
        gaps = [gap for times in self._times for gap in _gaps_within(times, begun, ended)]
        return {
            "seconds": ended - begun,
            "between_tokens": _spread(gaps),
            "cpu_seconds_of_a_step": None if cpu is None else ((_cpu(self._site) or 0) - cpu) / steps,
        }

    async def leave(self) -> None:
        """All at once."""
        for each in self._asking:
            each.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _listener(self, number: int) -> Callable[[], None]:
        return lambda: self._times[number].append(time.perf_counter())


def _bytes_of(card: dict[str, Any], tokens: int) -> int:
    """Bytes of the state of a request, by what the server says."""
    return card["state_bytes"] + tokens * card["state_bytes_per_token"]


def _cpu(site: _Site) -> float | None:
    return site.process.cpu_seconds if site.process is not None else None


def _tokens(count: int, seed: int) -> list[int]:
    """Random ids, the same for the same seed."""
    return torch.randint(_BYTES, (max(count, 1),), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()


def _gaps(times: Sequence[float]) -> list[float]:
    """Between the tokens of an answer, which begins with when it was asked."""
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


def _gaps_within(times: Sequence[float], start: float, end: float) -> list[float]:
    pairs = itertools.pairwise(times)
    return [later - earlier for earlier, later in pairs if earlier >= start and later <= end]


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, mean, 99th percentile, and of how many; None of none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    middle = {"median": statistics.median(ordered), "mean": statistics.fmean(ordered)}
    return {**middle, "percentile_99": late, "count": len(ordered)}
