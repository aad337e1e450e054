"""A small model behind HTTP on a free port of this machine, and what asks it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from polysketch.data.tokenization import BytesTokenizer
from polysketch.generation import Engine, Snapshots, generate
from polysketch.models import ModelConfig, TransformerLM

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from polysketch.serving.app import build_app
from polysketch.serving.limits import Limits
from polysketch.serving.running import address_of, listen, server_of
from polysketch.serving.served_model import ServedModel
from polysketch.serving.worker import Worker


class PacedEngine(Engine):
    """An engine whose steps take a while, and fail when they are told to."""

    pace = 0.0
    failure: Exception | None = None

    def step(self) -> list:
        """As there."""
        time.sleep(self.pace)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().step()


@dataclass
class Running:
    """A server that answers.

    Attributes:
        address: for clients.
        served: what it serves.
        engine: what computes.
        worker: the thread around it.
        server: of uvicorn.
    """

    address: str
    served: ServedModel
    engine: PacedEngine
    worker: Worker
    server: Any

    def stop(self) -> None:
        """As a signal does."""
        self.server.should_exit = True

    def greedy(self, prompt: str, length: int) -> str:
        """What `generate` says."""
        tokens = generate(
            self.served.model,
            [self.served.tokenizer.encode(prompt)],
            max_new_tokens=length,
            temperature=0,
            stop=self.served.tokenizer.end_of_text,
        ).tokens[0]
        return self.served.tokenizer.decode(tokens)

    def idle(self) -> bool:
        """Whether, within seconds, nothing is left to do."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if self.engine.is_idle and self.worker.is_idle:
                return True
            time.sleep(0.01)
        return False


def render_simply(messages: list[dict[str, str]]) -> list[int]:
    """A chat template in Python."""
    text = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
    return BytesTokenizer().encode(f"{text}assistant: ")


@pytest.fixture(scope="session")
def served() -> ServedModel:
    """A model that writes letters, another text for every prompt."""
    torch.manual_seed(3)
    mechanisms = {"attention": ("polysketch", "linear"), "attention_options": ({"window": 8}, {})}
    model = TransformerLM(ModelConfig(257, 2, 64, 2, **mechanisms))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.1 * torch.randn_like(parameter))
        model.output_bias.fill_(-100.0)
        model.output_bias[ord("a") : ord("z") + 1] = 0.0
    return ServedModel("small", model.eval(), BytesTokenizer(), render_simply)


@contextmanager
def serving(served: ServedModel, *, slots: int = 4, token: str | None = None, **limits: Any) -> Iterator[Running]:
    """A server in a thread."""
    bounds = Limits(**{"new_tokens": 2000, **limits})
    engine = PacedEngine(served.model, slots=slots, chunk=64, snapshots=Snapshots(1 << 24))
    worker, ready = Worker(engine, bounds.queue), threading.Event()
    with listen("127.0.0.1", 0) as listening:
        server = server_of(build_app(served, worker, bounds, token=token), grace=5, ready=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        address = address_of(listening)
        thread.start()
        assert ready.wait(20)
        try:
            yield Running(address, served, engine, worker, server)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def serve(served: ServedModel) -> Iterator[Callable[..., Any]]:
    """Start a server with limits of a test's own; without a chat template or with more ends where that is asked for."""

    @contextmanager
    def start(*, without_template: bool = False, ends: tuple[int, ...] = (), **options: Any) -> Iterator[Running]:
        model = replace(served, declared_ends=frozenset(ends))
        with serving(replace(model, render=None) if without_template else model, **options) as running:
            yield running

    return start


@pytest.fixture(scope="module")
def server(served: ServedModel) -> Iterator[Running]:
    """A server for the tests of a file, which leave it idle."""
    with serving(served) as running:
        yield running
